"""`fedsign tune search`: the best settings of one experiment, by the search of a comparison, beside the experiment as given.

The result is a comparison of two or three rows that differ by their settings: as given, found by the search, learnt by gradients at equal compute.
Each is trained on all training samples with seeds that no trial has seen, so that the page says what tuning has gained, and which way wins.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedsign.comparison.folder import Comparison
from fedsign.comparison.summary import Plan
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.metrics import is_higher_better
from fedsign.storage.disk import write_text
from simulations.comparison.cells import CellValue, Configs, cell_of, search, trial_of
from simulations.comparison.plan import VALIDATION_FRACTION, check_search, check_seeds, check_tuning_seeds
from simulations.comparison.play import check_is_free, environment, play_plan
from simulations.comparison.search import BATCH
from simulations.tuning.gradients import FILE, Gradients, Learnt

GIVEN, FOUND, LEARNT = "given", "found", "learnt"
LABELS = {GIVEN: "As given", FOUND: "Search", LEARNT: "Gradients"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is searched: so many trials, each with the seeds of tuning; what is found is trained again with `seeds`."""

    trials: int
    seeds: Sequence[int]
    tuning_seeds: Sequence[int]
    ranges: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gradients: Gradients | None = None


def tune(
    config: ExperimentConfig, asked: Asked, folder: Path, *, workers: int | None = None, extend: bool = False
) -> Comparison:
    """Search, learn if asked for, and train all again; what the folder holds is not played again.

    Raises:
        FedSignError: something cannot be searched, learnt or played.
    """
    if asked.trials < 1:
        raise ConfigError(f"--trials {asked.trials} was given, but expected is 1 or more, such as --trials 16.")
    check_seeds(asked.seeds)
    check_tuning_seeds(asked.tuning_seeds, asked.seeds)
    check_search(asked.ranges, [config.strategy.name])
    tried = config.replace(**{"data.validation_fraction": config.data.validation_fraction or VALIDATION_FRACTION})
    learnt = None
    if asked.gradients is not None:
        budget = asked.trials * len(asked.tuning_seeds) * config.rounds
        check_is_free(folder, (FILE,))
        learnt = asked.gradients.learn(tried, asked.tuning_seeds, folder, budget=budget)
    make = partial(make_plan, config, tried, asked, learnt, environment=environment(asked.trials))
    done = play_plan(Comparison(folder), make, workers=workers, extend=extend, beside=(FILE,))
    write_text(folder / "found.toml", found_config(config, done).to_toml())
    return done


def found_config(config: ExperimentConfig, done: Comparison) -> ExperimentConfig:
    """The experiment with the best settings: those of the best trial, of the search or of what was learnt, by validation samples."""
    (choice,) = [trial.choice for trial in done.summary().trials if trial.chosen and trial.strategy == FOUND]
    return config.replace(**choice)


def make_plan(
    config: ExperimentConfig,
    tried: ExperimentConfig,
    asked: Asked,
    learnt: Learnt | None,
    *,
    environment: Mapping[str, Any],
    value_of: CellValue = lambda cell: None,
) -> tuple[Plan, Configs]:
    """The trials, as far as the values of the cells so far reach; then the runs that count."""
    metric = config.metrics[0].rpartition(":")[2] if config.metrics else "loss"
    higher, seeds = is_higher_better(metric), asked.tuning_seeds
    found = search(
        tried, FOUND, {}, num=asked.trials, seeds=seeds, given=asked.ranges, higher_is_better=higher, value_of=value_of
    )
    cells, configs, records = list(found.cells), dict(found.configs), [dict(found.record)]
    if learnt is not None:
        trial = trial_of(tried, LEARNT, {}, learnt.values, number=0, seeds=seeds)
        cells = [cell for cell, _ in trial] + cells
        configs |= {cell.id: each for cell, each in trial}
        records.append(learnt.record(LEARNT, runs=len(seeds)))
    choices = {GIVEN: {}, FOUND: found.best, **({} if learnt is None else {LEARNT: learnt.values})}
    num_to_come = found.num_to_come
    if found.best is None:
        num_to_come += len(choices) * len(asked.seeds)
    else:
        for seed in asked.seeds:
            for name, choice in choices.items():
                own = config.replace(seed=seed, **{"data.validation_fraction": 0.0}, **(choice or {}))
                cells.append(cell := cell_of(own, {}, choice or {}, name=name))
                configs[cell.id] = own
    labels = {name: LABELS[name] for name in choices}
    tuning = {
        "labels": labels,
        "trials": asked.trials,
        "batch": BATCH,
        "seeds": list(seeds),
        "validation_fraction": tried.data.validation_fraction,
        "settings": {},
        "searches": records,
        "num_to_come": num_to_come,
        **({} if learnt is None else {"lead": learnt.lead}),
    }
    request = {"command": "tune search", **dataclasses.asdict(asked)}
    return Plan(
        name=config.name,
        metric=metric,
        higher_is_better=higher,
        reference=GIVEN,
        target=None,
        labels=labels,
        seeds=tuple(asked.seeds),
        cells=tuple(cells),
        config_toml=config.to_toml(),
        request=json.loads(json.dumps(request)),
        environment=environment,
        tuning=json.loads(json.dumps(tuning)),
    ), configs
