"""Every rule that can be broken is applied, and nothing else is refused."""

from types import SimpleNamespace

import pytest

from fedsign import compatibility
from fedsign.compatibility import Experiment, check_experiment
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.records import ObjectiveSpec
from fedsign.rules import Choice, Rule
from fedsign.workload import Workload

SHARDED = Choice(
    made=lambda config: config.ranks > 1,
    given="ranks={ranks} was given, but",
    rules=(
        Rule(
            lambda config: config.ranks % config.groups,
            "groups={groups} leaves a remainder of {found}",
            "choose a divisor",
        ),
        Rule(lambda config: config.ranks > config.gpus, "there are {gpus} GPUs"),
    ),
    remedy="or give ranks=1",
)


@pytest.mark.parametrize(
    ("ranks", "groups", "gpus", "said"),
    [
        (4, 2, 4, ""),
        (4, 3, 4, "ranks=4 was given, but groups=3 leaves a remainder of 1; choose a divisor; or give ranks=1"),
        (4, 2, 2, "ranks=4 was given, but there are 2 GPUs; or give ranks=1"),
        (4, 3, 2, "ranks=4 was given, but groups=3 leaves a remainder of 1; choose a divisor; or give ranks=1"),
        (1, 3, 0, ""),
    ],
    ids=["fits", "first rule", "last rule", "both", "not chosen"],
)
def test_a_choice_is_refused_by_the_first_of_its_rules_that_is_broken(
    ranks: int, groups: int, gpus: int, said: str
) -> None:
    assert SHARDED.refusal(SimpleNamespace(ranks=ranks, groups=groups, gpus=gpus)) == said


@pytest.mark.parametrize("rounds", [5, 6])
def test_a_capabilitys_rules_are_applied_to_an_experiment(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule[Experiment](
        lambda config: config.config.rounds > 5, "rounds={config.rounds} was given", "give 5 at most"
    )
    monkeypatch.setattr(compatibility, "extensions", {"rules": ((rule,),)}.__getitem__)
    experiment = Experiment(workload=Workload(from_dict({"rounds": rounds})), spec=ObjectiveSpec())
    if rounds == 5:
        check_experiment(experiment)
    else:
        with pytest.raises(ConfigError, match=r"^rounds=6 was given; give 5 at most\.$"):
            check_experiment(experiment)
