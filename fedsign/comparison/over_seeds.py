"""Summarize the runs of a comparison: chosen hyperparameters, means over seeds, curves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsign.comparison.summary import LAST, CellResult, Curve, Entry, Plan, Summary, Trial, values_label
from fedsign.comparison.target import default_target, to_target, total, with_speed_up
from fedsign.comparison.tuning import is_lost_trial, tuned_trials
from fedsign.intervals import mean_and_std, paired_difference
from fedsign.storage.results import Record

_NOT_CURVES = frozenset({"round", "clients", "failures"})  # keys of a record of rounds.jsonl


def summarize(plan: Plan, path: Path, results: Sequence[CellResult]) -> Summary:
    """Choose hyperparameters on validation samples, then summarize the runs with that choice only."""
    # trials train on fewer samples and with other seeds, so they never count as results
    everything, results = results, [each for each in results if each.cell.trial is None]
    conditions = distinct(each.cell.condition for each in results)
    trials: list[Trial] = tuned_trials(plan, everything)
    num_trials = {search["strategy"]: search["trials"] for search in plan.tuning.get("searches", ())}
    entries: list[Entry] = []
    for condition in conditions:
        taken, num_choices = {}, {}
        for name in plan.labels:
            own = [each for each in results if (each.cell.condition, each.cell.strategy) == (condition, name)]
            tried = _trials(plan, own)
            choice = next(trial.choice for trial in tried if trial.chosen)
            taken[name] = [each for each in own if each.cell.choice == choice]
            num_choices[name] = num_trials.get(name, len(tried))
            trials += tried if len(tried) > 1 else []
        reference = taken[plan.reference]
        target = plan.target
        if target is None:
            end, _ = mean_and_std(_finals(reference, plan.metric).values())
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
        tuning=plan.tuning,
        config_toml=plan.config_toml,
        environment=plan.environment,
        population={
            values_label(condition): next(
                (each.population for each in results if each.cell.condition == condition and each.population), {}
            )
            for condition in conditions
        },
        num_cells=len(plan.cells) + plan.tuning.get("num_to_come", 0),
        num_finished=sum(each.is_finished or is_lost_trial(each) for each in everything),
        failed={each.cell.id: each.failure for each in results if each.failure is not None},
        seconds=sum(each.seconds for each in everything),
    )


def distinct(values: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Distinct mappings, in order of first appearance."""
    unique: list[Mapping[str, Any]] = []
    for value in values:
        if value not in unique:
            unique.append(value)
    return unique


def curves(runs: Sequence[Sequence[Record]]) -> dict[str, Curve]:
    """Mean curves of all metrics over runs; None in rounds where any run lacks the value."""
    by_round = [{int(record["round"]): record for record in records} for records in runs]
    rounds = tuple(sorted(set().union(*by_round)))
    metrics = dict.fromkeys(
        key for records in runs for record in records for key, value in record.items() if _is_metric(value)
    )
    by_name = {}
    for name in metrics:
        if name in _NOT_CURVES:
            continue
        values = [[records.get(round, {}).get(name) for records in by_round] for round in rounds]
        pairs = [(None, None) if None in row else mean_and_std(row) for row in values]
        by_name[name] = Curve(
            rounds=rounds,
            mean=tuple(mean for mean, _ in pairs),
            std=tuple(0.0 if std is None and mean is not None else std for mean, std in pairs),
        )
    return by_name


def _is_metric(value: object) -> bool:
    # bool is a subclass of int
    return isinstance(value, int | float) and not isinstance(value, bool)


def _trials(plan: Plan, results: Sequence[CellResult]) -> list[Trial]:
    """All choices of one strategy under one condition, compared by validation metrics only.

    A choice with failed or unfinished runs cannot win over one whose runs all ended: the remaining seeds would be the
    lucky ones.
    """
    key = f"validation_{plan.metric}"
    sign = 1 if plan.higher_is_better else -1
    trials: list[Trial] = []
    ranks: list[tuple[int, float]] = []
    for choice in distinct(each.cell.choice for each in results):
        values = list(_finals([each for each in results if each.cell.choice == choice], key).values())
        mean, std = mean_and_std(values)
        rank = (sum(value is not None for value in values), 0.0 if mean is None else sign * mean)
        ranks.append(rank)
        trial = Trial(
            strategy=results[0].cell.strategy,
            condition=results[0].cell.condition,
            choice=choice,
            validation_mean=mean,
            validation_std=std,
            chosen=False,
        )
        trials.append(trial)
    best = ranks.index(max(ranks))  # the first among ties
    trials[best] = replace(trials[best], chosen=True)
    return trials


def _entry(
    plan: Plan,
    results: Sequence[CellResult],
    reference: Sequence[CellResult],
    *,
    num_choices: int,
    target: float | None,
) -> Entry:
    """The results of one strategy under one condition, from the cells of its choice."""
    cell, values = results[0].cell, _finals(results, plan.metric)
    finished = [each for each in results if each.is_finished]
    num_failed = sum(each.failure is not None for each in results)
    runs, direction = [each.records for each in finished], plan.higher_is_better
    taken, taken_by_reference = (
        to_target(each, plan.metric, target, higher_is_better=direction) for each in (results, reference)
    )
    is_reference = cell.strategy == plan.reference
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
        if is_reference
        else paired_difference(values, _finals(reference, plan.metric), higher_is_better=direction),
        to_target=taken if is_reference else with_speed_up(taken, taken_by_reference),
        bytes_down=mean_and_std(total(records, "bytes_down") for records in runs)[0],
        bytes_up=mean_and_std(total(records, "bytes_up") for records in runs)[0],
        curves=curves(runs),
        failures=sum(len(record.get("failures") or ()) for each in results for record in each.records),
        num_failed=num_failed,
        unfinished=len(results) - len(finished) - num_failed,
        folders=tuple(each.folder for each in finished if each.folder is not None),
        settings=next((each.settings for each in results if each.settings), {}),
        findings=tuple((each.cell.seed, finding) for each in results for finding in each.findings),
    )


def _finals(results: Iterable[CellResult], key: str) -> dict[int, float | None]:
    """Seed -> final value, for finished cells."""
    return {each.cell.seed: each.final(key) for each in results if each.is_finished}
