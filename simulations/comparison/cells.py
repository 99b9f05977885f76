"""A cell of a comparison, and the cells of a hyperparameter search."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedsign.comparison.summary import Cell, Plan
from fedsign.comparison.tuning import best_trial
from fedsign.config import ExperimentConfig
from simulations.comparison.search import BATCH, Choice, trials
from simulations.comparison.space import space_of
from simulations.jobs import digest_of

_LONGEST = 80  # characters of a cell's readable name

Configs = Mapping[str, ExperimentConfig]
CellValue = Callable[[Cell], float | None]
"""Maps a trial's cell to its validation value: NaN if the run was lost, None if it has not ended."""


def metric_of(config: ExperimentConfig) -> str:
    """Return the metric that judges runs: the first configured one, or the loss."""
    return config.metrics[0].rpartition(":")[2] if config.metrics else "loss"


def cell_of(
    config: ExperimentConfig,
    condition: Mapping[str, Any],
    choice: Mapping[str, Any],
    *,
    name: str = "",
    trial: int | None = None,
) -> Cell:
    """Return a configuration's cell, under the strategy's name or another one."""
    digest, name = digest_of(config), name or config.strategy.name
    values = {**condition, **choice} if trial is None else {"trial": trial}
    parts = [name, *(f"{key.rpartition('.')[2]}{value}" for key, value in values.items())]
    # no dot or dash first: a hidden folder, or an option of whatever command is given the path
    readable = re.sub(r"[^0-9A-Za-z._]", "-", "-".join(parts)).lstrip("._-")[:_LONGEST]
    return Cell(
        # The digest finds a run by everything that its result depends on; the rest of the name is for people.
        id=f"{readable or 'cell'}-seed{config.seed}-{digest}",
        strategy=name,
        # as it will be read back (tuples are lists then), so that planned and recorded cells compare equal
        condition=json.loads(json.dumps(condition)),
        choice=json.loads(json.dumps(choice)),
        seed=config.seed,
        rounds=config.rounds,
        trial=trial,
    )


def trial_of(
    config: ExperimentConfig,
    name: str,
    condition: Mapping[str, Any],
    choice: Mapping[str, Any],
    *,
    number: int,
    seeds: Sequence[int],
) -> list[tuple[Cell, ExperimentConfig]]:
    """Return the cells of one trial, with their configurations."""
    configs = [config.replace(seed=seed, **choice) for seed in seeds]
    return [(cell_of(each, condition, choice, name=name, trial=number), each) for each in configs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The progress of one search over the settings of `config`, under a strategy's name."""

    record: Mapping[str, Any]  # see [Note: trials] in fedsign.comparison.tuning
    cells: Sequence[Cell]
    configs: Configs
    num_to_come: int  # cells not requested yet
    best: Choice | None  # None until all trials have ended


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialCase:
    """A strategy that the searched one is at `settings`, nearly, with its search."""

    strategy: str
    search: Search
    settings: Choice

    def choice(self, given: Choice) -> Choice | None:
        """The settings of its best trial, with the searched strategy's own in place of its own; None before the end."""
        best = self.search.best
        if best is None:
            return None
        return given | {key: value for key, value in best.items() if not key.startswith("strategy.")} | self.settings


def search(
    config: ExperimentConfig,
    name: str,
    condition: Mapping[str, Any],
    *,
    num: int,
    seeds: Sequence[int],
    given: Mapping[str, str],
    higher_is_better: bool,
    value_of: CellValue,
    special_case: SpecialCase | None = None,
) -> Search:
    """Return all trials that can be requested, given the cells' values so far.

    Args:
        config: the experiment as given, which is the first trial.
        name: the strategy of the cells.
        condition: the condition of the cells.
        num: number of trials.
        seeds: the seeds of each trial. Its value is their mean; if one is lost, the trial is.
        given: key -> range, in addition to the declared and the shared ones.
        higher_is_better: whether the metric is maximized.
        value_of: returns a cell's value.
        special_case: tried last, in place of a suggested trial.
    """
    space = space_of(config, given)
    cells: list[Cell] = []
    configs: dict[str, ExperimentConfig] = {}
    values: list[list[float | None]] = []

    def trial_value(number: int, choice: Choice) -> float | None:
        trial = trial_of(config, name, condition, choice, number=number, seeds=seeds)
        cells.extend(cell for cell, _ in trial)
        configs.update((cell.id, each) for cell, each in trial)
        scores = [value for cell, _ in trial if (value := value_of(cell)) is not None]
        # all or nothing: a mean of the seeds that happened to be faster would steer the search
        if len(scores) < len(seeds):
            return None
        values.append([None if math.isnan(value) else value for value in scores])
        return sum(scores) / len(scores)  # NaN if a seed was lost, which loses the trial

    first = {key: config.get(key, None) for key in space}
    num_suggested = num - (special_case is not None)
    choices = trials(
        space, first, num=num_suggested, seed=config.seed, higher_is_better=higher_is_better, value_of=trial_value
    )
    if special_case is not None and len(choices) == num_suggested and (last := special_case.choice(first)) is not None:
        trial_value(num_suggested, last)
        choices.append(last)
    special = {"strategy": special_case.strategy, "settings": special_case.settings} if special_case else {}
    is_over = len(values) == num
    return Search(
        record={
            "strategy": name,
            "condition": json.loads(json.dumps(condition)),
            "space": {key: {**asdict(each), "text": each.text} for key, each in space.items()},
            "trials": num,
            "runs": num * len(seeds),
            "rounds": num * len(seeds) * config.rounds,
            **({"special_case": special} if special else {}),
        },
        cells=cells,
        configs=configs,
        num_to_come=(num - len(choices)) * len(seeds),
        # from the seeds' values: among lost trials the one that lost fewer seeds wins
        best=choices[best_trial(values, higher_is_better=higher_is_better)] if is_over else None,
    )


def with_searches(
    plan: Plan,
    searches: Sequence[Search],
    finals: Sequence[tuple[Cell, ExperimentConfig]],
    *,
    seeds: Sequence[int],
    fraction: float,
    settings: Mapping[str, Any] | None = None,
    lead: str = "",
) -> tuple[Plan, Configs]:
    """Add the trials of all searches to a plan, batch by batch; once all have ended, add the final runs.

    Args:
        plan: a plan without cells.
        searches: the searches' progress.
        finals: the final runs. Only their number is used until all searches have ended.
        seeds: the trials' seeds.
        fraction: the fraction of training samples held out in trials.
        settings: settings of trials only.
        lead: the page's description of the budgets, where these are not numbers of trials.
    """
    # The sort is stable: existing cells stay in front when the plan grows.
    cells = sorted((cell for each in searches for cell in each.cells), key=lambda cell: (cell.trial or 0) // BATCH)
    configs = {id: config for each in searches for id, config in each.configs.items()}
    num_to_come = sum(each.num_to_come for each in searches)
    if all(each.best is not None for each in searches):
        # at the end: a plan only ever grows
        cells += [cell for cell, _ in finals]
        configs |= {cell.id: config for cell, config in finals}
    else:
        num_to_come += len(finals)
    tuning = {
        "labels": plan.labels,
        "batch": BATCH,
        "seeds": seeds,
        "validation_fraction": fraction,
        "settings": settings or {},
        "searches": [each.record for each in searches],
        "num_to_come": num_to_come,
        "lead": lead,
    }
    return replace(plan, cells=tuple(cells), tuning=json.loads(json.dumps(tuning))), configs
