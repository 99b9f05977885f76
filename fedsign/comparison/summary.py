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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsign.comparison.over_seeds import Curve as Curve
from fedsign.comparison.over_seeds import ToTarget as ToTarget
from fedsign.comparison.over_seeds import curves, default_target, to_target, total
from fedsign.intervals import Interval as Interval
from fedsign.intervals import mean_and_std, paired_difference
from fedsign.registry import target_of
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
    target: float | None  # as given; None: see fedsign.comparison.over_seeds.default_target
    labels: Mapping[str, str]  # of the strategies, in the order given
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    config_toml: str  # the base experiment, complete
    request: Mapping[str, Any]  # what was asked for; the cells' configurations are made of it again
    environment: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One tried choice of one strategy under one condition: what the validation samples said."""

    strategy: str
    condition: Mapping[str, Any]
    choice: Mapping[str, Any]
    validation_mean: float | None
    validation_std: float | None
    chosen: bool


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


def summarise(plan: Plan, path: Path, played: Sequence[Played]) -> Summary:
    """Choose by the validation samples, then read everything else off the chosen cells."""
    conditions = distinct(cell.condition for cell in plan.cells)
    trials: list[Trial] = []
    entries: list[Entry] = []
    for condition in conditions:
        taken, num_choices = {}, {}
        for name in plan.labels:
            own = [each for each in played if (each.cell.condition, each.cell.strategy) == (condition, name)]
            tried = _trials(plan, own)
            choice = next(trial.choice for trial in tried if trial.chosen)
            taken[name], num_choices[name] = [each for each in own if each.cell.choice == choice], len(tried)
            trials += tried if len(tried) > 1 else []
        reference = _finals(taken[plan.reference], plan.metric)
        target = plan.target
        if target is None:
            end, _ = mean_and_std(reference.values())
            target = default_target(end, higher_is_better=plan.higher_is_better)
        entries += [
            _entry(plan, taken[name], reference, num_choices=num_choices[name], target=target) for name in taken
        ]
    return Summary(
        name=plan.name,
        path=path,
        metric=plan.metric,
        higher_is_better=plan.higher_is_better,
        last=min(LAST, max(cell.rounds for cell in plan.cells)),
        target=target if len(conditions) == 1 else plan.target,
        reference=plan.reference,
        conditions=tuple(conditions),
        entries=tuple(entries),
        trials=tuple(trials),
        config_toml=plan.config_toml,
        environment=plan.environment,
        population={
            values_label(condition): next(
                (each.population for each in played if each.cell.condition == condition and each.population), {}
            )
            for condition in conditions
        },
        num_cells=len(plan.cells),
        num_finished=sum(each.is_finished for each in played),
        failed={each.cell.id: each.failure for each in played if each.failure is not None},
        seconds=sum(each.seconds for each in played),
    )


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


def distinct(values: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each mapping once, in the order of the first."""
    found: list[Mapping[str, Any]] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _trials(plan: Plan, played: Sequence[Played]) -> list[Trial]:
    """All choices of one strategy under one condition.  Only validation figures are looked at.

    A choice with which a run failed, or has not ended, cannot win over one with which all runs ended: what is
    left of it would be the lucky seeds.
    """
    key = f"validation_{plan.metric}"
    sign = 1 if plan.higher_is_better else -1
    found: list[tuple[tuple[int, float], Trial]] = []
    for choice in distinct(each.cell.choice for each in played):
        values = list(_finals([each for each in played if each.cell.choice == choice], key).values())
        mean, std = mean_and_std(values)
        rank = (sum(value is not None for value in values), 0.0 if mean is None else sign * mean)
        cell = played[0].cell
        trial = Trial(
            strategy=cell.strategy,
            condition=cell.condition,
            choice=choice,
            validation_mean=mean,
            validation_std=std,
            chosen=False,
        )
        found.append((rank, trial))
    best = max(rank for rank, _ in found)
    chosen = next(trial for rank, trial in found if rank == best)  # the first of equals
    return [replace(trial, chosen=trial is chosen) for _, trial in found]


def _entry(
    plan: Plan,
    played: Sequence[Played],
    reference: Mapping[int, float | None],
    *,
    num_choices: int,
    target: float | None,
) -> Entry:
    """One strategy under one condition, read off the cells of its choice."""
    cell, values = played[0].cell, _finals(played, plan.metric)
    finished = [each for each in played if each.is_finished]
    num_failed = sum(each.failure is not None for each in played)
    runs, direction = [each.lines for each in finished], plan.higher_is_better
    mean, std = mean_and_std(values.values())
    return Entry(
        strategy=cell.strategy,
        label=plan.labels[cell.strategy],
        condition=cell.condition,
        choice=cell.choice,
        num_choices=num_choices,
        seeds=tuple(values),
        values=tuple(values.values()),
        mean=mean,
        std=std,
        difference=None
        if cell.strategy == plan.reference
        else paired_difference(values, reference, higher_is_better=direction),
        to_target=to_target(runs, plan.metric, target, higher_is_better=direction, num_failed=num_failed),
        bytes_down=mean_and_std(total(lines, "bytes_down") for lines in runs)[0],
        bytes_up=mean_and_std(total(lines, "bytes_up") for lines in runs)[0],
        curves=curves(runs),
        failures=sum(len(line.get("failures") or ()) for each in played for line in each.lines),
        num_failed=num_failed,
        unfinished=len(played) - len(finished) - num_failed,
        folders=tuple(each.folder for each in finished if each.folder is not None),
    )


def _finals(played: Iterable[Played], key: str) -> dict[int, float | None]:
    """Seed -> final value, of the cells that have finished."""
    return {each.cell.seed: each.final(key) for each in played if each.is_finished}
