"""`fedsign tune search`: search one experiment's best settings, and compare them with its current ones.

The result is a comparison with two or three rows that differ in their settings: the experiment's own, those of the
search, and optionally those learned by gradients at equal compute.  Each row is trained on all training samples with
seeds that no trial used, so the page shows the gain of tuning, and whether search or gradients gained more.
"""

import dataclasses
import itertools
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
from fedsign.storage.owned import check_writable, write_owned
from simulations.bilevel.kept_steps import FILE as STEPS
from simulations.comparison.cells import (
    CellValue,
    Configs,
    Search,
    cell_of,
    metric_of,
    search,
    trial_of,
    with_searches,
)
from simulations.comparison.checks import check_search, check_seeds, check_tuning_seeds
from simulations.comparison.execution import check_is_free, environment, run_plan
from simulations.comparison.plan import VALIDATION_FRACTION
from simulations.tuning.gradients import FILE, Gradients, Learned

GIVEN, FOUND, LEARNED = "given", "found", "learned"
LABELS = {GIVEN: "As given", FOUND: "Search", LEARNED: "Gradients"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to search: the number of trials, each with the tuning seeds; the final training uses `seeds`."""

    trials: int
    seeds: Sequence[int]
    tuning_seeds: Sequence[int]
    ranges: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gradients: Gradients | None = None


def tune(
    config: ExperimentConfig, options: Options, folder: Path, *, workers: int | None = None, extend: bool = False
) -> Comparison:
    """Search, learn if requested, and train all rows; existing results in the folder are reused.

    Raises:
        FedSignError: something cannot be searched, learned or run.
    """
    if options.trials < 1:
        raise ConfigError(f"--trials {options.trials} was given, but expected 1 or more, such as --trials 16.")
    check_seeds(options.seeds)
    check_tuning_seeds(options.tuning_seeds, options.seeds)
    check_search(options.ranges, [config.strategy.name])
    tuned = config.replace(**{"data.validation_fraction": config.data.validation_fraction or VALIDATION_FRACTION})
    check_writable(folder, "found.toml")
    learned = None
    if options.gradients is not None:
        budget = options.trials * len(options.tuning_seeds) * config.rounds
        # before hours of learning, whose result would have no place
        check_is_free(folder, (FILE, STEPS))
        learned = options.gradients.learn(tuned, options.tuning_seeds, folder, budget=budget)
    make = partial(make_plan, config, tuned, options, learned, environment=environment(options.trials))
    comparison = run_plan(Comparison(folder), make, workers=workers, extend=extend, allowed=(FILE,))
    text = found_config(config, comparison).to_toml()
    write_owned(folder / "found.toml", lambda staged: write_text(staged, text))
    return comparison


def found_config(config: ExperimentConfig, comparison: Comparison) -> ExperimentConfig:
    """Return the experiment with the settings of the best trial on validation samples."""
    # exactly one: `run_plan` returns when all trials have ended
    (choice,) = [trial.choice for trial in comparison.summary().trials if trial.chosen and trial.strategy == FOUND]
    return config.replace(**choice)


def make_plan(
    config: ExperimentConfig,
    tuned: ExperimentConfig,
    options: Options,
    learned: Learned | None,
    *,
    environment: Mapping[str, Any],
    value_of: CellValue = lambda cell: None,
) -> tuple[Plan, Configs]:
    """Return the trials, as far as the cells' values so far determine them, then the final runs."""
    metric, seeds = metric_of(config), options.tuning_seeds
    higher = is_higher_better(metric)
    searched = search(
        tuned,
        FOUND,
        {},
        num=options.trials,
        seeds=seeds,
        given=options.ranges,
        higher_is_better=higher,
        value_of=value_of,
    )
    searches, choices = [searched], {GIVEN: {}, FOUND: searched.best or {}}
    if learned is not None:
        choices[LEARNED] = dict(learned.values)
        trial = trial_of(tuned, LEARNED, {}, learned.values, number=0, seeds=seeds)
        searches.append(
            Search(
                record=learned.record(LEARNED, runs=len(seeds)),
                cells=[cell for cell, _ in trial],
                configs={cell.id: each for cell, each in trial},
                num_to_come=0,
                best=choices[LEARNED],
            )
        )
    finals = []
    # seed by seed, so that an interrupted comparison has pairs
    for seed, (name, choice) in itertools.product(options.seeds, choices.items()):
        own = config.replace(seed=seed, **{"data.validation_fraction": 0.0, **choice})
        finals.append((cell_of(own, {}, choice, name=name), own))
    request = {"command": "tune search", **dataclasses.asdict(options)}
    plan = Plan(
        name=config.run_name,
        metric=metric,
        higher_is_better=higher,
        reference=GIVEN,
        target=None,
        labels={name: LABELS[name] for name in choices},
        seeds=tuple(options.seeds),
        cells=(),
        config_toml=config.to_toml(),
        request=json.loads(json.dumps(request)),
        environment=environment,
    )
    fraction, lead = tuned.data.validation_fraction, "" if learned is None else learned.lead
    return with_searches(plan, searches, finals, seeds=seeds, fraction=fraction, lead=lead)
