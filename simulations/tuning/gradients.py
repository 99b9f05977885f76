"""Gradient-based hyperparameter tuning, with the compute budget of the search it is compared with.

Compute is counted in plain rounds of the experiment.  The cost of a differentiated round is measured: the
floating-point operations of a gradient step over those of its rounds alone, by `torch.utils.flop_counter`, which counts
matrix products and omits elementwise operations.  (With `forward_exact` and an MLP it is about 3 for one setting, and
1.2 more for each further one.)  The final evaluation and its validation runs count as well.  Seconds are also recorded,
to show how well the count predicts them.
"""

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
from simulations.bilevel.kept_steps import FILE as STEPS
from simulations.bilevel.kept_steps import Step
from simulations.jobs import digest_of

FILE = "learned.json"
_COUNTED_ROUNDS = 2  # in the measurement of operations


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """The learned settings, and the compute spent."""

    values: Mapping[str, Any]
    steps: int
    rounds: int  # per step
    cost: float  # of a differentiated round, in plain rounds
    seconds: float
    budget: float  # the search's, in rounds
    spent: float  # in rounds, including the validation of the learned settings
    diverged: bool
    losses: Sequence[float] = ()  # per step

    @property
    def lead(self) -> str:
        """Describe both budgets."""
        return (
            f"The search and the gradients had the same compute: that of {self.budget:,.0f} rounds, of which the "
            f"gradients used {self.spent:,.0f}. Compute is counted in floating-point operations, and said in rounds "
            "of plain training."
        )

    def record(self, name: str, *, runs: int) -> dict[str, Any]:
        """Return the record; see [Note: trials] in fedsign.comparison.tuning."""
        stopped = "; diverged in the last one" if self.diverged else ""
        budget = (
            f"{plural(self.steps, 'step')} of {plural(self.rounds, 'round')}, each at {self.cost:g}: "
            f"{self.spent:,.0f} rounds{stopped}"
        )
        facts = {"strategy": name, "condition": {}, "space": {}, "trials": 1, "runs": runs, "rounds": round(self.spent)}
        return {**facts, "budget": budget, "seconds": self.seconds, "losses": list(self.losses)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """What to learn, and how. `rounds`: per step; 0 for the experiment's."""

    names: tuple[str, ...]
    rounds: int = 0
    lr: float = 0.1
    method: str = "forward_exact"

    def learn(self, config: ExperimentConfig, seeds: Sequence[int], folder: Path, *, budget: float) -> Learned:
        """Learn for this budget, or read the folder's result of the same budget; seeds take turns, step by step.

        Raises:
            ConfigError: a setting cannot be learned, or the budget is too small for a step.
        """
        if WEIGHTS in self.names:
            raise ConfigError(
                f"{WEIGHTS} was given, but weights are of the clients of one split, and tuning and results have "
                "splits of their own; learn them with 'fedsign tune learn'."
            )
        rounds = self.rounds or config.rounds
        cost = self.cost(config.replace(seed=seeds[0]), rounds=rounds)
        # the final evaluation costs a step, too
        steps = int((budget - len(seeds) * config.rounds) / (rounds * cost)) - 1
        if steps < 1:
            raise ConfigError(
                f"the search's {budget:g} rounds are not worth a step of {plural(rounds, 'round')} at {cost:g} each, "
                "the last look at what was learned and its validation; raise --trials or lower --learn-rounds."
            )
        path = folder / FILE
        if not path.exists() and (former := folder / "learnt.json").exists():  # the former name
            path = former
        digest = digest_of(
            config, seeds=list(seeds), names=self.names, steps=steps, rounds=rounds, lr=self.lr, method=self.method
        )
        saved = _read(path, digest)
        if saved is None:
            saved = {"digest_of": digest, **self._learn(config, seeds, folder, steps=steps, rounds=rounds)}
            write_text(path, sealed_json(saved))
            (folder / STEPS).unlink(missing_ok=True)
        # counted from the steps taken: a learning that diverged spent less
        spent = len(saved["steps"]) * rounds * cost + len(seeds) * config.rounds
        return Learned(
            values={name: saved["values"][name] for name in self.names},
            steps=len(saved["steps"]) - 1,
            rounds=rounds,
            cost=cost,
            seconds=saved["seconds"],
            budget=budget,
            spent=spent,
            diverged=saved["diverged"],
            losses=[step["loss"] for step in saved["steps"]],
        )

    def cost(self, config: ExperimentConfig, *, rounds: int) -> float:
        """Measure the cost of a differentiated round, in plain rounds."""
        # a few rounds suffice: both counts are proportional to the number of rounds
        options = learning.Options(names=self.names, rounds=min(rounds, _COUNTED_ROUNDS), method=self.method)
        counted = learning.Learning(config, options)
        problem, meta = counted.problem(), counted.start
        method = plugins.build("hypergradient", self.method, {})
        # random directions cost the same, whichever they are
        rng = torch_generator(config.seed, Purpose.LEARNING)
        step = _operations(lambda: method(problem, meta, generator=rng))
        return round(step / _operations(lambda: final_state(problem, meta)), 2)

    def _learn(
        self, config: ExperimentConfig, seeds: Sequence[int], folder: Path, *, steps: int, rounds: int
    ) -> dict[str, Any]:
        """Return the trajectory; if it diverges, up to the step before."""
        options = learning.Options(names=self.names, steps=steps, rounds=rounds, lr=self.lr, method=self.method)
        first, *others = (learning.Learning(config.replace(seed=seed), options) for seed in seeds)
        kept, trajectory, diverged = learning.kept_steps(folder, first, others), list[Step](), False
        try:
            for step in learning.shown_steps(first, others, kept=kept):
                trajectory.append(step)
        except RoundError:
            # it diverged with the experiment's own settings: nothing was learned
            if not trajectory:
                raise
            diverged = True
        # four digits, as in a search
        values = {name: float(f"{trajectory[-1][name]:.4g}") for name in self.names}
        return {"values": values, "seconds": kept.seconds, "steps": trajectory, "diverged": diverged}


def _operations(compute: Callable[[], Any]) -> int:
    """Count floating-point operations of all matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops())


def _read(path: Path, digest: str) -> dict[str, Any] | None:
    """Read the stored result; None if there is none for this request and budget.

    Raises:
        ResultsError: the file is damaged.
    """
    if not path.exists():
        return None
    try:
        content, _ = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} is damaged ({error}); remove it, and it is learned again.") from error
    return content if content.get("digest_of") == digest else None
