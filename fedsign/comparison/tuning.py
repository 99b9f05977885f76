"""Hyperparameter search: what a plan stores about it, and the results of its cells on disk.

[Note: trials] A *trial* is the runs of one choice of settings, with seeds for tuning.  Trials train on fewer samples,
as some are held out for validation.  The runs that count follow: with the settings of the best trial, on all training
samples, with seeds that no trial has used.  `Plan.tuning` holds

labels, batch, seeds, validation_fraction, settings, num_to_come
lead        the budgets in words, if they are not a number of trials; or empty
searches    one per strategy and condition: its space (key -> range), and its cost in trials, runs and rounds; for
            gradient-based tuning, `budget` says the cost in words and `seconds` adds to the time of the runs
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsign.comparison.summary import CellResult, Plan, Trial
from fedsign.intervals import mean_and_std

Values = Sequence[float | None]  # of a trial, by seed; None for a diverged or failed run


def best_trial(values: Sequence[Values], *, higher_is_better: bool) -> int:
    """Index of the best mean, the first among ties; fewer lost seeds always win.

    >>> best_trial([[0.5, 0.7], [0.9, None], [0.6, 0.6]], higher_is_better=True)
    0
    """
    ranks = [_rank(each, 1 if higher_is_better else -1) for each in values]
    return ranks.index(max(ranks))


def _rank(values: Values, sign: int) -> tuple[int, float]:
    mean, _ = mean_and_std(values)
    return sum(value is not None for value in values), -math.inf if mean is None else sign * mean


def is_lost_trial(result: CellResult) -> bool:
    """Whether a trial's run failed, e.g. diverged, which is a regular outcome of a search."""
    return result.cell.trial is not None and result.failure is not None


def validation_value(result: CellResult, metric: str) -> float | None:
    """The validation metric of a trial's run: NaN if it was lost, None if it has not ended."""
    if not result.is_finished:
        return None if result.failure is None else math.nan
    value = result.final(f"validation_{metric}")
    return math.nan if value is None else value


def tuned_trials(plan: Plan, results: Sequence[CellResult]) -> list[Trial]:
    """All trials so far, by search; each completed search has one chosen trial."""
    all_trials: list[Trial] = []
    for search in plan.tuning.get("searches", ()):
        of_search = [each for each in results if _is_of(each, search)]
        numbers = sorted({each.cell.trial for each in of_search if each.cell.trial is not None})
        trials = [_trial(plan, [each for each in of_search if each.cell.trial == number]) for number in numbers]
        if len(trials) == search["trials"] and all(len(trial.values) == len(plan.tuning["seeds"]) for trial in trials):
            best = best_trial([trial.values for trial in trials], higher_is_better=plan.higher_is_better)
            trials[best] = replace(trials[best], chosen=True)
        all_trials += trials
    return all_trials


def _is_of(result: CellResult, search: Mapping[str, Any]) -> bool:
    cell = result.cell
    return cell.trial is not None and (cell.strategy, cell.condition) == (search["strategy"], search["condition"])


def _trial(plan: Plan, runs: Sequence[CellResult]) -> Trial:
    cell = runs[0].cell
    results = [validation_value(each, plan.metric) for each in runs]
    # from here on None is a lost run; runs that have not ended are left out
    values = tuple(None if math.isnan(value) else value for value in results if value is not None)
    mean, std = mean_and_std(values)
    return Trial(
        strategy=cell.strategy,
        condition=cell.condition,
        choice=cell.choice,
        validation_mean=mean,
        validation_std=std,
        chosen=False,
        number=cell.trial,
        num_lost=values.count(None),
        values=values,
        seconds=sum(each.seconds for each in runs),
    )
