"""What a comparison is, and what is read off it: strategies side by side over seeds and a grid.

[Note: cells, choices, conditions] A *cell* is one run.  Keys of the grid under `strategy`, `client` and
`server` are *choices*, except for participation and local work (`server.cohort_size`, `client.local_epochs`,
`client.local_steps`, `client.batch_size`): hyper-parameters, of which each strategy gets its best one, chosen by
the mean over seeds of the metric on validation samples that are held out of training, never by the test samples.
All other keys, and those given to `by`, are *conditions*: each combination is a table column of its own.  Seeds
are paired: the same seed gives every strategy the same data split, partition, initial model, cohorts and batch
orders.
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
from fedsign.storage.results import Line, final_value

LAST = 5
"""The final value of a run is the mean of this many last rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of a comparison."""

    id: str  # readable, and at its end the digest
    strategy: str
    condition: Mapping[str, Any]
    choice: Mapping[str, Any]
    seed: int
    rounds: int
    trial: int | None = None  # of a search of settings, from 0 on; None: counts as a result

    @property
    def digest(self) -> str:
        """A hash of all that the results depend on."""
        return self.id.rpartition("-")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is compared, and how it is judged; the content of comparison.json."""

    name: str
    metric: str  # such as "accuracy"
    higher_is_better: bool
    reference: str
    target: float | None  # as given; None: see fedsign.comparison.target.default_target
    labels: Mapping[str, str]  # of the strategies, in the order given
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    config_toml: str  # the base experiment, complete
    request: Mapping[str, Any]  # what was asked for; the cells' configurations are made of it again
    environment: Mapping[str, Any] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)  # see fedsign.comparison.tuning; empty without
    rows: tuple[Mapping[str, Any], ...] = ()  # of an ablation, see fedsign.ablation.controls.Control

    @property
    def grows(self) -> bool:
        """Whether cells follow from what others have measured."""
        return bool(self.tuning or self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What a cell has left on disk so far."""

    cell: Cell
    is_finished: bool
    folder: Path | None = None
    lines: Sequence[Line] = ()
    population: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str | None = None  # why it failed; None: it has finished, or is still to be played (on)

    def final(self, key: str) -> float | None:
        """Mean of a figure over the last rounds."""
        return final_value(list(self.lines), key, last=LAST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A figure per round over seeds: mean and sample standard deviation; None where a seed has no number."""

    rounds: tuple[int, ...]
    mean: tuple[float | None, ...]
    std: tuple[float | None, ...]  # 0.0 for one seed


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedUp:
    """How many times fewer rounds than the reference; with a `sign`, the ratio is a bound and has no interval."""

    ratio: float | None  # None: pairs are censored on both sides
    low: float | None
    high: float | None
    sign: Literal["", "<", ">"]
    num_pairs: int
    num_censored: int  # pairs of which a run did not reach the target


@dataclass(frozen=True, kw_only=True, slots=True)
class ToTarget:
    """What it took to reach the target and stay; see [Note: reached, censored] in fedsign.comparison.target.

    Medians are over all seeds that finished or failed.
    """

    target: float
    reached: Mapping[int, int | None]  # seed -> round; None: censored
    limits: Mapping[int, int]  # seed -> the last round from which on it could have been seen to stay
    is_bound: bool  # the medians are lower bounds
    rounds: float | None  # None without a seed
    bytes_down: float | None
    bytes_up: float | None
    speed_up: SpeedUp | None = None  # None for the reference itself

    @property
    def num_seeds(self) -> int:
        """Those that finished or failed."""
        return len(self.reached)

    @property
    def num_reached(self) -> int:
        """Those that are not censored."""
        return sum(round is not None for round in self.reached.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One strategy under one condition, at its chosen hyper-parameters."""

    strategy: str
    label: str  # for tables and legends, such as "FedSign"
    condition: Mapping[str, Any]
    choice: Mapping[str, Any]  # the chosen values of the grid; empty without a grid of choices
    num_choices: int  # how many were tried
    seeds: tuple[int, ...]  # finished ones
    values: tuple[float | None, ...]  # final value per seed (mean of the last rounds); None: diverged
    mean: float | None
    std: float | None
    difference: Interval | None  # to the reference strategy, paired over seeds; None for the reference itself
    to_target: ToTarget | None
    bytes_down: float | None  # mean over seeds, whole run
    bytes_up: float | None
    curves: Mapping[str, Curve]  # metric, loss, train_loss, client_drift, ... by name
    failures: int  # client replies that could not be used, all seeds
    num_failed: int  # cells that failed: they are played again only if asked for, and have no value
    unfinished: int  # cells that are still to be played, or to be played on
    folders: tuple[Path, ...]  # the runs

    @property
    def num_seeds(self) -> int:
        """All seeds that were planned, whatever became of them."""
        return len(self.seeds) + self.num_failed + self.unfinished

    @property
    def num_values(self) -> int:
        """Seeds that ended with a number, which the mean is of."""
        return sum(value is not None for value in self.values)

    @property
    def num_diverged(self) -> int:
        """Seeds that finished without a number."""
        return len(self.values) - self.num_values

    @property
    def num_lost(self) -> int:
        """Seeds that will have no number: what is left of the strategy are its lucky ones."""
        return self.num_diverged + self.num_failed

    @property
    def seeds_of_all(self) -> str:
        """`2 of 3 seeds`, where the mean is not of all seeds that were planned; empty where it is."""
        return "" if self.num_values == self.num_seeds else f"{self.num_values} of {plural(self.num_seeds, 'seed')}"

    @property
    def seed_troubles(self) -> str:
        """What became of the seeds that have no value; empty where all have one."""
        said = [(self.num_diverged, "diverged"), (self.num_failed, "failed"), (self.unfinished, "unfinished")]
        return ", ".join(f"{count:,} {what}" for count, what in said if count)

    @property
    def troubles(self) -> str:
        """What went wrong, in few words; empty where nothing did."""
        replies = f"{self.failures:,} failed {'reply' if self.failures == 1 else 'replies'}" if self.failures else ""
        return ", ".join(filter(None, [self.seed_troubles, replies]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One tried choice of one strategy under one condition: what the validation samples said."""

    strategy: str
    condition: Mapping[str, Any]
    choice: Mapping[str, Any]
    validation_mean: float | None
    validation_std: float | None
    chosen: bool
    number: int | None = None  # of a search of settings, from 0 on
    num_lost: int = 0  # its runs that diverged or failed
    values: tuple[float | None, ...] = ()  # of its runs that have ended, seed by seed
    seconds: float = 0.0  # of its runs, added up


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """All that the table, the figures, the page and the export show."""

    name: str
    path: Path
    metric: str  # such as "accuracy"
    higher_is_better: bool
    last: int  # the final value is the mean of so many last rounds; fewer than LAST where fewer are played
    target: float | None  # None: each condition has its own, see Entry.to_target
    reference: str  # the strategy that differences are taken to
    conditions: tuple[Mapping[str, Any], ...]
    entries: tuple[Entry, ...]  # condition by condition, strategies in the order given
    trials: tuple[Trial, ...] = ()
    tuning: Mapping[str, Any] = field(default_factory=dict)  # the plan's
    config_toml: str = ""  # the base experiment, complete
    environment: Mapping[str, Any] = field(default_factory=dict)
    # partition.json of the first cell of each condition, by condition label (`values_label`)
    population: Mapping[str, Any] = field(default_factory=dict)
    num_cells: int = 0
    num_finished: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)  # id -> why, of the cells that failed
    seconds: float = 0.0  # of all cells, added up

    @property
    def num_pending(self) -> int:
        """Cells that are still to be played, or to be played on."""
        return self.num_cells - self.num_finished - len(self.failed)

    @property
    def num_seeds(self) -> int:
        """The most seeds that one of the entries has."""
        return max((len(entry.seeds) for entry in self.entries), default=0)

    @property
    def labels(self) -> dict[str, str]:
        """Of the strategies, in the order given; the position is a strategy's color and line style."""
        return {entry.strategy: entry.label for entry in self.entries}

    @property
    def reference_label(self) -> str:
        """Of the strategy that differences are taken to."""
        return self.labels.get(self.reference, self.reference)

    @property
    def metric_name(self) -> str:
        """The metric in words; the figures on test samples are meant wherever nothing else is said."""
        return self.metric.replace("_", " ")

    @property
    def scale(self) -> Scale:
        """Two decimals of a percentage; four significant digits of anything else."""
        if is_share(self.metric):
            return Scale(decimals=2, percent=True, factor=100.0, unit="%")
        sizes = [abs(entry.mean) for entry in self.entries if entry.mean]
        magnitude = math.floor(math.log10(sorted(sizes)[len(sizes) // 2])) if sizes else 0
        return Scale(decimals=min(8, max(0, 3 - magnitude)))

    @property
    def last_rounds(self) -> str:
        """What a final value is: `mean of the last 5 rounds`."""
        return "value of the last round" if self.last == 1 else f"mean of the last {self.last} rounds"

    def entries_of(self, condition: Mapping[str, Any]) -> list[Entry]:
        """The strategies under a condition, in the order given."""
        return [entry for entry in self.entries if entry.condition == condition]


def strategy_label(name: str) -> str:
    """A strategy's name for tables and legends.

    >>> strategy_label("fedsign"), strategy_label("flower_fedavg"), strategy_label("mine:Anchored")
    ('FedSign', 'FedAvg (Flower)', 'Anchored')
    """
    module, _, attribute = target_of("strategy", name).partition(":")
    return f"{attribute} (Flower)" if module.partition(".")[0] == "flwr" else attribute


def values_label(values: Mapping[str, Any]) -> str:
    """A condition or a choice in one line; empty for none.

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
    """All combinations, the last axis running fastest.

    >>> products({"a": [1, 2], "b": [3]}), products({})
    ([{'a': 1, 'b': 3}, {'a': 2, 'b': 3}], [{}])
    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
