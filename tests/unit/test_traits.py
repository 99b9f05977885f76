"""User-defined classes declare traits and rules as ours do; undeclared ones have safe defaults."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from benchmarks.compatibility import refusal, strategy
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.records import ObjectiveSpec
from fedsign.registry import KINDS
from fedsign.rules import Rule
from fedsign.storage.results import RunFolder
from fedsign.traits import TRAITS, EngineTraits, declares, traits_shown
from fedsign.workload import Workload
from simulations.rounds import OnRound
from strategies.base import Strategy

HERE = __name__


class Whole(Strategy):
    """Needs the same tensors from every client."""

    takes_parts = False
    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule(
            lambda config: config.server.cohort_size < 4,
            "strategy.name={strategy.name} was given with server.cohort_size={server.cohort_size}",
            "ask 4 or more",
        ),
    )


class Doubling(Strategy):
    """Weights replies by a method of its own."""

    def weight(self, reply: Any) -> float:
        return 2.0


@declares(takes_model=True, trains_part=True)
def halves(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Says that it trains a part; nothing trains here."""
    return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)


class Elsewhere:
    """An engine that declares nothing."""

    def check(self, workload: Workload) -> None: ...

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None: ...


class Here(Elsewhere):
    """One that declares that clients train in this process."""

    trains_here = True


@declares(targets="real targets")
def error(outputs: Tensor, targets: Tensor) -> float:
    return 0.0


class Spread(Objective):
    """A contrast that is no mean over samples, and does not say that it were."""

    contrasts = True

    def contrast(self, z: Representation, context: LocalContext) -> Tensor | None:
        return z.present.std()


class Spreading(Strategy):
    def objective(self, round: int) -> ObjectiveSpec:
        return ObjectiveSpec(name=f"{HERE}:Spread")


PRIVATE = {"name": "central", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01}
HALVES, COHORT = {"optimizer": {"name": f"{HERE}:halves"}}, {"path": "cohort"}


@pytest.mark.parametrize(
    ("experiment", "said"),
    [
        ({"client": HALVES}, ""),
        ({"client": HALVES, "strategy": {"name": f"{HERE}:Doubling"}}, ""),
        pytest.param(
            {"client": HALVES, "strategy": {"name": f"{HERE}:Whole"}},
            "trains a part .* needs to know how far every",
            marks=pytest.mark.needs("partial"),
        ),
        pytest.param(
            {"client": HALVES, "strategy": strategy("flower_fedadam")},
            "trains a part .* is Flower's",
            marks=pytest.mark.needs("partial"),
        ),
        pytest.param(
            {"privacy": PRIVATE, "strategy": {"name": f"{HERE}:Doubling"}},
            "weights its replies",
            marks=pytest.mark.needs("privacy"),
        ),
        pytest.param(
            {"client": COHORT, "engine": {"name": f"{HERE}:Elsewhere"}},
            "Elsewhere gives each client a process of its own",
            marks=pytest.mark.needs("cohort"),
        ),
        pytest.param({"client": COHORT, "engine": {"name": f"{HERE}:Here"}}, "", marks=pytest.mark.needs("cohort")),
        ({"metrics": [f"{HERE}:error"]}, "has class labels, for which .*error' says nothing"),
        (
            {"client": {"micro_batch": 4}, "strategy": {"name": f"{HERE}:Spreading"}},
            r"Spread' does not say that its contrast is a mean .*\(contrast_is_mean\)",
        ),
    ],
)
def test_what_a_class_declares_decides_what_it_goes_with(experiment: Mapping[str, Any], said: str) -> None:
    found = refusal({"model": {"name": "mlp", "hidden": [4]}, "callbacks": [], **experiment})
    assert bool(found) == bool(said) and re.search(said, found), found


def test_a_class_declares_rules_over_the_whole_configuration() -> None:
    own = {"strategy": {"name": f"{HERE}:Whole"}}
    with pytest.raises(ConfigError, match=r"Whole was given with server\.cohort_size=3; ask 4 or more\.$"):
        from_dict({**own, "server": {"cohort_size": 3}})
    assert from_dict({**own, "server": {"cohort_size": 4}}).server.cohort_size == 4


def test_what_is_not_declared_is_shown_with_its_default() -> None:
    assert traits_shown("engine", f"{HERE}:Elsewhere") == {
        "defined in": f"{HERE}:Elsewhere",
        "trains_here": False,
        "is_deployed": False,
        "keeps_processes": False,
    }
    shown = traits_shown("strategy", f"{HERE}:Whole")
    assert (shown["proposes_update"], shown["takes_parts"]) == (True, False)
    assert shown["rule 1"] == "strategy.name=... was given with server.cohort_size=...; ask 4 or more"


def test_names_are_found_by_what_they_declare() -> None:
    assert EngineTraits.having(trains_here=True) == ["in_process"]
    for kind, traits in TRAITS.items():
        assert traits.kind == kind
        for name in KINDS[kind].table:
            traits.of(name)
