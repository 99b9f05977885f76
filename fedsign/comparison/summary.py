"""The plan of a comparison and the summary of its runs: strategies side by side over seeds and a grid.

[Note: cells, choices, conditions] A *cell* is one run.  Grid keys under `strategy`, `client` and `server` are
*choices*, i.e. hyperparameters: each strategy gets its best one, selected by the mean over seeds of the metric on
validation samples held out of training, never on test samples.  The exceptions are participation and local work
(`server.cohort_size`, `client.local_epochs`, `client.local_steps`, `client.batch_size`).  These, all other keys, and
those given to `by` are *conditions*: each combination is a column of the table.  Seeds are paired: the same seed gives
every strategy the same data split, partition, initial model, cohorts and batch order.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedsign.comparison.labels import Scale
from fedsign.intervals import Interval
from fedsign.registry import target_of
from fedsign.report.wording import is_share, plural
from fedsign.storage.results import Record, final_value

LAST = 5
"""The final value of a run is the mean over this many last rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of a comparison."""

    id: str  # a readable name that ends in the digest
    strategy: str
    condition: Mapping[str, Any]
    choice: Mapping[str, Any]
    seed: int
    rounds: int
    trial: int | None = None  # index in a hyperparameter search; None: the cell counts as a result

    @property
    def digest(self) -> str:
        """A hash of everything that the results depend on."""
        return self.id.rpartition("-")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is compared and how it is evaluated: the content of comparison.json."""

    name: str
    metric: str  # such as "accuracy"
    higher_is_better: bool
    reference: str
    target: float | None  # given by the user; None: see fedsign.comparison.target.default_target
    labels: Mapping[str, str]  # strategy -> label, in the given order
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    config_toml: str  # the base experiment, complete
    request: Mapping[str, Any]  # the user's request, from which the configurations of cells are rebuilt
    environment: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)  # see fedsign.comparison.tuning; empty without a search
    rows: tuple[Mapping[str, Any], ...] = ()  # fields of fedsign.ablation.controls.Control; only for an ablation

    @property
    def grows(self) -> bool:
        """Whether further cells depend on the results of earlier ones."""
        return bool(self.tuning or self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """The results of a cell on disk so far."""

    cell: Cell
    is_finished: bool
    folder: Path | None = None
    records: Sequence[Record] = ()
    population: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str | None = None  # why it failed; None: finished or pending
    settings: Mapping[str, Any] = field(default_factory=dict)  # the strategy's own
    findings: Sequence[Record] = ()

    def final(self, key: str) -> float | None:
        """Mean of a metric over the last rounds."""
        return final_value(list(self.records), key, last=LAST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A metric per round over seeds: mean and sample standard deviation; None where a seed lacks the value."""

    rounds: tuple[int, ...]
    mean: tuple[float | None, ...]
    std: tuple[float | None, ...]  # 0.0 for one seed


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedUp:
    """The ratio of rounds to the target, reference over own; with a `sign` it is a bound without an interval."""

    ratio: float | None  # None: pairs are censored on both sides
    low: float | None
    high: float | None
    sign: Literal["", "<", ">"]
    num_pairs: int
    num_censored: int  # pairs in which a run did not reach the target


@dataclass(frozen=True, kw_only=True, slots=True)
class ToTarget:
    """The cost to reach the target and stay there; see [Note: reached, censored] in fedsign.comparison.target.

    Medians are over all seeds that finished or failed.
    """

    target: float
    reached: Mapping[int, int | None]  # seed -> round; None: censored
    limits: Mapping[int, int]  # seed -> the last round at which reaching the target could be observed
    is_bound: bool  # the medians are lower bounds
    rounds: float | None  # None without seeds
    bytes_down: float | None
    bytes_up: float | None
    speed_up: SpeedUp | None = None  # None for the reference itself

    @property
    def num_seeds(self) -> int:
        """Seeds that finished or failed."""
        return len(self.reached)

    @property
    def num_reached(self) -> int:
        """Seeds that are not censored."""
        return sum(round is not None for round in self.reached.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One strategy under one condition, at its chosen hyperparameters."""

    strategy: str
    label: str  # for tables and legends, such as "FedSign"
    condition: Mapping[str, Any]
    choice: Mapping[str, Any]  # chosen hyperparameters; empty if none are in the grid
    num_choices: int  # number of choices tried
    seeds: tuple[int, ...]  # finished seeds
    values: tuple[float | None, ...]  # final value per seed (mean of the last rounds); None: diverged
    mean: float | None
    std: float | None
    difference: Interval | None  # to the reference, paired over seeds; None for the reference itself
    to_target: ToTarget | None
    bytes_down: float | None  # mean over seeds, whole run
    bytes_up: float | None
    curves: Mapping[str, Curve]  # metric, loss, train_loss, client_drift, ... by name
    failures: int  # unusable client replies, all seeds
    num_failed: int  # failed cells: without a value, rerun only on request
    unfinished: int  # cells to be run or resumed
    folders: tuple[Path, ...]  # the runs
    settings: Mapping[str, Any] = field(default_factory=dict)  # the strategy's own; empty before a run starts
    findings: tuple[tuple[int, Record], ...] = ()  # seed and finding, of all runs

    @property
    def num_seeds(self) -> int:
        """All planned seeds, whatever their outcome."""
        return len(self.seeds) + self.num_failed + self.unfinished

    @property
    def num_values(self) -> int:
        """Seeds with a final value, over which the mean is taken."""
        return sum(value is not None for value in self.values)

    @property
    def num_diverged(self) -> int:
        """Seeds that finished without a final value."""
        return len(self.values) - self.num_values

    @property
    def num_lost(self) -> int:
        """Seeds that will never have a value; the remaining ones are the lucky ones."""
        return self.num_diverged + self.num_failed

    @property
    def seeds_of_all(self) -> str:
        """`2 of 3 seeds` if the mean lacks some planned seeds; otherwise empty."""
        return "" if self.num_values == self.num_seeds else f"{self.num_values} of {plural(self.num_seeds, 'seed')}"

    @property
    def seed_troubles(self) -> str:
        """Outcomes of the seeds without a value; empty if there are none."""
        counts = [(self.num_diverged, "diverged"), (self.num_failed, "failed"), (self.unfinished, "unfinished")]
        return ", ".join(f"{count:,} {outcome}" for count, outcome in counts if count)

    @property
    def troubles(self) -> str:
        """A short list of what went wrong; empty if nothing did."""
        replies = f"{self.failures:,} failed {'reply' if self.failures == 1 else 'replies'}" if self.failures else ""
        return ", ".join(filter(None, [self.seed_troubles, replies]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One choice tried for one strategy under one condition: the result on validation samples."""

    strategy: str
    condition: Mapping[str, Any]
    choice: Mapping[str, Any]
    validation_mean: float | None
    validation_std: float | None
    chosen: bool
    number: int | None = None  # index in a hyperparameter search
    num_lost: int = 0  # diverged or failed runs
    values: tuple[float | None, ...] = ()  # of runs that have ended, by seed
    seconds: float = 0.0  # total of its runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Everything that the table, figures, page and export show."""

    name: str
    path: Path
    metric: str  # such as "accuracy"
    higher_is_better: bool
    last: int  # rounds averaged for the final value; fewer than LAST for short runs
    target: float | None  # None: each condition has its own, see Entry.to_target
    reference: str  # the strategy to which differences are taken
    conditions: tuple[Mapping[str, Any], ...]
    entries: tuple[Entry, ...]  # by condition, strategies in the given order
    trials: tuple[Trial, ...] = ()
    tuning: Mapping[str, Any] = field(default_factory=dict)  # the plan's
    config_toml: str = ""  # the base experiment, complete
    environment: Mapping[str, Any] = field(default_factory=dict)
    # condition label (`values_label`) -> partition.json of its first cell
    population: Mapping[str, Any] = field(default_factory=dict)
    num_cells: int = 0
    num_finished: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)  # cell id -> reason
    seconds: float = 0.0  # total of all cells

    @property
    def num_pending(self) -> int:
        """Cells to be run or resumed."""
        return self.num_cells - self.num_finished - len(self.failed)

    @property
    def num_seeds(self) -> int:
        """The largest number of finished seeds of an entry."""
        return max((len(entry.seeds) for entry in self.entries), default=0)

    @property
    def labels(self) -> dict[str, str]:
        """Strategy -> label in the given order, which also determines colors and line styles."""
        return {entry.strategy: entry.label for entry in self.entries}

    @property
    def reference_label(self) -> str:
        """The label of the reference strategy."""
        return self.labels.get(self.reference, self.reference)

    @property
    def metric_name(self) -> str:
        """The metric in words; on test samples, unless said otherwise."""
        return self.metric.replace("_", " ")

    @property
    def scale(self) -> Scale:
        """Two decimals for percentages; otherwise four significant digits."""
        if is_share(self.metric):
            return Scale(decimals=2, percent=True, factor=100.0, unit="%")
        sizes = [abs(entry.mean) for entry in self.entries if entry.mean]
        # of the median: a strategy that diverged must not cost the others their decimals
        magnitude = math.floor(math.log10(sorted(sizes)[len(sizes) // 2])) if sizes else 0
        return Scale(decimals=min(8, max(0, 3 - magnitude)))

    @property
    def last_rounds(self) -> str:
        """What a final value is, such as `mean of the last 5 rounds`."""
        return "value of the last round" if self.last == 1 else f"mean of the last {self.last} rounds"

    def entries_of(self, condition: Mapping[str, Any]) -> list[Entry]:
        """The strategies under a condition, in the given order."""
        return [entry for entry in self.entries if entry.condition == condition]


def strategy_label(name: str) -> str:
    """The name of a strategy in tables and legends.

    >>> strategy_label("fedsign"), strategy_label("flower_fedavg"), strategy_label("mine:Anchored")
    ('FedSign', 'FedAvg (Flower)', 'Anchored')
    """
    module, _, attribute = target_of("strategy", name).partition(":")
    return f"{attribute} (Flower)" if module.partition(".")[0] == "flwr" else attribute


def values_label(values: Mapping[str, Any]) -> str:
    """A condition or a choice on one line; empty for none.

    >>> values_label({"partition.alpha": 0.1, "model.name": "mlp"})
    'partition.alpha=0.1, model.name=mlp'
    >>> values_label({"partition": {"name": "classes", "classes_per_client": 2}})  # a whole table as a value
    'partition=classes (classes_per_client=2)'
    """
    return ", ".join(f"{key}={_value_label(value)}" for key, value in values.items())


def _value_label(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    settings = ", ".join(f"{key}={_value_label(inner)}" for key, inner in value.items() if key != "name")
    return " ".join(part for part in (str(value.get("name", "")), f"({settings})" if settings else "") if part)


def products(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations; the last axis varies fastest.

    >>> products({"a": [1, 2], "b": [3]}), products({})
    ([{'a': 1, 'b': 3}, {'a': 2, 'b': 3}], [{}])
    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
