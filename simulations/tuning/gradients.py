"""Settings learnt by gradients, for as much compute as the search that they are compared with.

Compute is counted in plain rounds of the experiment.  The cost of a differentiated round is measured: the
floating-point operations of a step of the gradients over those of its rounds alone, by `torch.utils.flop_counter`,
which counts products of matrices and leaves out elementwise operations.  (With `forward_exact` and an MLP it is about 3
for one setting, and 1.2 more for each further one.)  The last evaluation of what was learnt and its validation runs
count as well.  Seconds are recorded besides: they show how well the count holds on a machine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from fedsign import plugins
from fedsign.bilevel.federated import WEIGHTS
from fedsign.bilevel.unroll import final_state
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, ResultsError, RoundError
from fedsign.report.wording import plural
from fedsign.seeding import Purpose, torch_generator
from fedsign.storage.digests import read_json, sealed_json
from fedsign.storage.disk import write_text
from simulations.bilevel import learning
from simulations.jobs import digest_of

FILE = "learnt.json"
_COUNTED_ROUNDS = 2  # of which operations are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Learnt:
    """What was learnt, and what it took."""

    values: Mapping[str, Any]
    steps: int
    rounds: int  # of each step
    cost: float  # of a round
    seconds: float
    budget: float  # of the search, in rounds
    spent: float  # in rounds, the validation of what was learnt included
    diverged: bool
    losses: Sequence[float] = ()  # of the steps

    @property
    def lead(self) -> str:
        """What both had, in words."""
        return (
            f"The search and the gradients had the same compute: that of {self.budget:,.0f} rounds, of which the "
            f"gradients used {self.spent:,.0f}. Compute is counted in floating-point operations, and said in rounds "
            "of plain training."
        )

    def record(self, name: str, *, runs: int) -> dict[str, Any]:
        """See [Note: trials] in fedsign.comparison.tuning."""
        stopped = "; diverged in the last one" if self.diverged else ""
        said = (
            f"{plural(self.steps, 'step')} of {plural(self.rounds, 'round')}, each at {self.cost:g}: "
            f"{self.spent:,.0f} rounds{stopped}"
        )
        facts = {"strategy": name, "condition": {}, "space": {}, "trials": 1, "runs": runs, "rounds": round(self.spent)}
        return {**facts, "budget": said, "seconds": self.seconds, "losses": list(self.losses)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """What is learnt, and how; `rounds` of each step, 0 for the experiment's."""

    names: tuple[str, ...]
    rounds: int = 0
    lr: float = 0.1
    method: str = "forward_exact"

    def learn(self, config: ExperimentConfig, seeds: Sequence[int], folder: Path, *, budget: float) -> Learnt:
        """Learn for the budget, or read what the folder has of just that; the seeds take turns, step by step.

        Raises:
            ConfigError: a setting cannot be learnt, or the budget is not worth a step.
        """
        if WEIGHTS in self.names:
            raise ConfigError(
                f"{WEIGHTS} was given, but weights are of the clients of one split, and tuning and results have "
                "splits of their own; learn them with 'fedsign tune learn'."
            )
        rounds = self.rounds or config.rounds
        cost = self.cost(config.replace(seed=seeds[0]), rounds=rounds)
        # the last look at what was learnt is a step, too
        steps = int((budget - len(seeds) * config.rounds) / (rounds * cost)) - 1
        if steps < 1:
            raise ConfigError(
                f"the search's {budget:g} rounds are not worth a step of {plural(rounds, 'round')} at {cost:g} each, "
                "the last look at what was learnt and its validation; raise --trials or lower --learn-rounds."
            )
        path = folder / FILE
        digest = digest_of(
            config, seeds=list(seeds), names=self.names, steps=steps, rounds=rounds, lr=self.lr, method=self.method
        )
        found = _read(path, digest)
        if found is None:
            found = {"digest_of": digest, **self._learn(config, seeds, steps=steps, rounds=rounds)}
            write_text(path, sealed_json(found))
        spent = len(found["steps"]) * rounds * cost + len(seeds) * config.rounds
        return Learnt(
            values={name: found["values"][name] for name in self.names},
            steps=len(found["steps"]) - 1,
            rounds=rounds,
            cost=cost,
            seconds=found["seconds"],
            budget=budget,
            spent=spent,
            diverged=found["diverged"],
            losses=[step["loss"] for step in found["steps"]],
        )

    def cost(self, config: ExperimentConfig, *, rounds: int) -> float:
        """Of a round that is differentiated, in plain rounds."""
        asked = learning.Asked(names=self.names, rounds=min(rounds, _COUNTED_ROUNDS), method=self.method)
        counted = learning.Learning(config, asked)
        problem, meta = counted.problem(), counted.start
        method = plugins.build("hypergradient", self.method, {})
        rng = torch_generator(config.seed, Purpose.LEARNING)
        step = _operations(lambda: method(problem, meta, generator=rng))
        return round(step / _operations(lambda: final_state(problem, meta)), 2)

    def _learn(self, config: ExperimentConfig, seeds: Sequence[int], *, steps: int, rounds: int) -> dict[str, Any]:
        """The trajectory; of one that diverges the values before the step in which it does."""
        asked = learning.Asked(names=self.names, steps=steps, rounds=rounds, lr=self.lr, method=self.method)
        first, *others = (learning.Learning(config.replace(seed=seed), asked) for seed in seeds)
        begun, trajectory, diverged = time.monotonic(), list[learning.Step](), False
        try:
            for step in first.steps(others):
                trajectory.append(step)
        except RoundError:
            if not trajectory:
                raise
            diverged = True
        values = {name: float(f"{trajectory[-1][name]:.4g}") for name in self.names}
        return {"values": values, "seconds": time.monotonic() - begun, "steps": trajectory, "diverged": diverged}


def _operations(compute: Callable[[], Any]) -> int:
    """Floating-point operations of all products of matrices and convolutions."""
    with FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops())


def _read(path: Path, digest: str) -> dict[str, Any] | None:
    """What was learnt of just this; None without, or of another budget.

    Raises:
        ResultsError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        found, _ = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} is damaged ({error}); remove it, and it is learnt again.") from error
    return found if found.get("digest_of") == digest else None
