"""The plan of a comparison: a list of cells, each with a complete configuration.

See [Note: cells, choices, conditions] in fedsign.comparison.summary. Strategy settings of the base experiment apply to
its own strategy only. Under a condition on `strategy.X`, a strategy without a setting X has the same configuration for
every value: it is planned under each value and run once.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from fedsign.comparison.summary import Cell, Plan, products, strategy_label
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, nearest
from fedsign.metrics import is_higher_better
from fedsign.report.wording import is_share
from simulations.comparison.cells import (
    CellValue,
    Configs,
    Search,
    SpecialCase,
    cell_of,
    metric_of,
    search,
    with_searches,
)
from simulations.comparison.checks import check
from simulations.comparison.request import Request, own_values
from simulations.comparison.space import contained

VALIDATION_FRACTION = 0.1
Condition = Mapping[str, Any]


def make_plan(
    base: ExperimentConfig,
    request: Request,
    *,
    name: str,
    reference: str | None = None,
    target: float | None = None,
    environment: Mapping[str, Any],
    value_of: CellValue = lambda cell: None,
) -> tuple[Plan, Configs]:
    """Return the plan, and each cell's configuration by cell id; a search reaches as far as its cells have values.

    Raises:
        ConfigError: something requested does not exist, is given twice, or cannot be compared.
    """
    check(request)
    metric = metric_of(base)
    if reference is None:
        reference = "fedavg" if "fedavg" in request.strategies else request.strategies[0]
    if reference not in request.strategies:
        raise ConfigError(
            f"the reference '{reference}' is not among the strategies {', '.join(request.strategies)}."
            f"{nearest(reference, request.strategies)} Name one of them, or add it with --strategies."
        )
    if target is not None and not math.isfinite(target):
        raise ConfigError(f"the target {target} was given, but expected a finite number, such as --target 0.9.")
    if target is not None and is_share(metric) and not 0 < target <= 1:
        raise ConfigError(
            f"the target {target:g} was given, but {metric} is a share, up to 1; give one, such as --target 0.9."
        )
    plan = Plan(
        name=name,
        metric=metric,
        higher_is_better=is_higher_better(metric),
        reference=reference,
        target=target,
        labels=_labels(request.strategies),
        seeds=tuple(request.seeds),
        cells=(),
        config_toml=base.to_toml(),
        # as it will be read from comparison.json, which it is compared with
        request=json.loads(json.dumps(asdict(request))),
        environment=environment,
    )
    if request.trials:
        return _tuned(base, request, plan, value_of)
    cells, cell_configs = _cells(base, request)
    return replace(plan, cells=tuple(cells)), cell_configs


def _cells(base: ExperimentConfig, request: Request) -> tuple[list[Cell], Configs]:
    """Return all requested combinations."""
    shared = _validation(base, request)
    cells: list[Cell] = []
    words_of: dict[str, str] = {}  # digest -> the values that led to it
    configs: dict[str, ExperimentConfig] = {}
    for condition in products(request.condition_axes):
        for strategy in request.strategies:
            for choice in request.choices(strategy):
                own = own_values(condition, strategy)  # without settings that the strategy lacks
                words = json.dumps([own, choice])
                # later entries win: a choice over a condition over --set
                changes = {
                    "strategy.name": strategy,
                    **shared,
                    **own_values(request.settings, strategy),
                    **own,
                    **choice,
                }
                for seed in request.seeds:
                    config = base.replace(seed=seed, **changes)
                    cell = cell_of(config, condition, choice)
                    # a strategy without a condition's key has equal words under all of its values, and shares the run
                    if words_of.setdefault(cell.digest, words) != words:
                        raise ConfigError(
                            f"the grid gives {strategy} the same configuration twice "
                            f"({', '.join(f'{key}={value}' for key, value in {**condition, **choice}.items())}); "
                            "name every value once."
                        )
                    cells.append(cell)
                    configs[cell.id] = config
    return cells, configs


def _tuned(base: ExperimentConfig, request: Request, plan: Plan, value_of: CellValue) -> tuple[Plan, Configs]:
    """Return the plan with a search over the settings of each strategy.

    Each search covers one strategy under one condition, or under all conditions that differ only in keys of
    `tuning_settings`.  A search of a strategy that contains another compared one ends with that one's best settings
    and a small strength of its own.
    """
    conditions = products(request.condition_axes)
    fraction = _validation(base, request)
    searches: dict[str, Search] = {}  # by strategy and condition of the trials
    finals = []

    def experiment(strategy: str, fixed: Condition) -> ExperimentConfig:
        own = {**own_values(request.settings, strategy), **own_values(fixed, strategy)}
        return base.replace(**{"strategy.name": strategy, **fraction, **own})

    def searched(strategy: str, fixed: Condition) -> Search:
        # conditions that differ only in `tuning_settings` have the same key, and share a search
        key = json.dumps([strategy, fixed])
        if key not in searches:
            config, given, special = experiment(strategy, fixed), own_values(request.search, strategy), None
            confined = given | {name: str(value) for name, value in own_values(fixed, strategy).items()}
            for other in request.strategies if request.trials > 1 else ():
                settings = contained(config, experiment(other, fixed), confined)
                if special is None and settings is not None:
                    special = SpecialCase(strategy=other, search=searched(other, fixed), settings=settings)
            searches[key] = search(
                config,
                strategy,
                fixed,
                num=request.trials,
                seeds=request.tuning_seeds,
                given=given,
                higher_is_better=plan.higher_is_better,
                value_of=value_of,
                special_case=special,
            )
        return searches[key]

    asked: dict[int, Search] = {}  # in the order of the strategies: a special case is searched first
    for condition, strategy in itertools.product(conditions, request.strategies):
        found = searched(strategy, {**condition, **request.tuning_settings})
        asked[id(found)] = found
        own = {"strategy.name": strategy, **own_values(request.settings, strategy), **own_values(condition, strategy)}
        # until the search is over, only the number of final runs counts
        choice = found.best or {}
        for seed in request.seeds:
            # nothing is left to select: the final runs train on all training samples
            config = base.replace(seed=seed, **{"data.validation_fraction": 0.0, **own, **choice})
            finals.append((cell_of(config, condition, choice), config))
    return with_searches(
        plan,
        [*asked.values()],
        finals,
        seeds=request.tuning_seeds,
        fraction=fraction["data.validation_fraction"],
        settings=request.tuning_settings,
    )


def _validation(base: ExperimentConfig, request: Request) -> dict[str, float]:
    """Return the fraction that every cell holds out, so that all strategies train on the same samples."""
    fraction = request.validation_fraction
    has_choices = bool(request.trials) or any(len(request.choices(strategy)) > 1 for strategy in request.strategies)
    if fraction is None and has_choices:
        fraction = base.data.validation_fraction or VALIDATION_FRACTION
    if fraction is None:
        return {}
    if not 0 <= fraction < 1 or (has_choices and fraction == 0):
        raise ConfigError(
            f"a validation fraction of {fraction} was given, but expected a number above 0 and below 1: "
            "hyper-parameters are chosen on the training samples that are held out."
        )
    return {"data.validation_fraction": fraction}


def _labels(strategies: Iterable[str]) -> dict[str, str]:
    """Return a short label per strategy, or its full name where two labels would be equal."""
    labels = {strategy: strategy_label(strategy) for strategy in strategies}
    shared = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    return {strategy: strategy if label in shared else label for strategy, label in labels.items()}
