"""What is to be compared, as a list of cells, each with a complete configuration.

See [Note: cells, choices, conditions] in fedsign.comparison.summary.  A key may be given for one strategy alone, as
"fedprox:strategy.mu".  Without a strategy, a key `strategy.X` is for those of the strategies that have a
setting X.  The settings of the base experiment's own strategy hold for that strategy only.

Conditions are the keys of `by`, and those keys of `grid` that are no hyper-parameters: how much is trained and by how
many (`ABLATIONS`) is what papers vary, not what they tune.  Under a condition on `strategy.X`, a strategy without a
setting X has the same configuration for every value; it is planned under each and played once.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedsign import plugins
from fedsign.comparison.summary import Cell, Plan, products, strategy_label
from fedsign.config import ExperimentConfig, parse_override
from fedsign.errors import ConfigError
from fedsign.metrics import is_higher_better
from fedsign.registry import nearest, resolve
from simulations.comparison.cells import CellValue, cell_of, search
from simulations.comparison.search import BATCH
from simulations.comparison.space import SHARED

STRATEGIES = ("fedavg", "fedprox", "feddyn", "fedsign")
NUM_SEEDS = 5
VALIDATION_FRACTION = 0.1
ABLATIONS = ("server.cohort_size", "client.local_epochs", "client.local_steps", "client.batch_size")
_CHOICES = ("strategy", "client", "server")  # sections whose other keys are hyper-parameters
_OTHERWISE = {
    "seed": "give the seeds with --seeds",
    "strategy.name": "give the strategies with --strategies",
    "data.validation_fraction": "give it with --validation-fraction",
    "name": "give the comparison's name with --name",
    "metrics": "every cell is judged by the same metric; set it with --set",
    "callbacks": "it changes no result",
    "results": "it changes no result",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a user asks for.  Keys of `grid` and `settings` may begin with a strategy: "fedprox:strategy.mu".

    Keys of `by` are conditions, whatever they are.
    """

    strategies: Sequence[str] = STRATEGIES
    seeds: Sequence[int] = ()
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    by: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    validation_fraction: float | None = None
    trials: int = 0  # of the search of each strategy's settings; 0: none
    tuning_seeds: Sequence[int] = ()
    search: Mapping[str, str] = field(default_factory=dict)  # key -> range
    tuning_settings: Mapping[str, Any] = field(default_factory=dict)  # of the trials, in the place of conditions

    def choices(self, strategy: str) -> list[dict[str, Any]]:
        """All combinations of hyper-parameters to try for one strategy."""
        axes = {key: values for key, values in self.grid.items() if _is_choice(key)}
        return products(_own(axes, strategy))

    @property
    def condition_axes(self) -> dict[str, Sequence[Any]]:
        """The keys that conditions are made of, with their values."""
        return {**{key: values for key, values in self.grid.items() if not _is_choice(key)}, **self.by}


def parse_axis(text: str, *, option: str = "--grid") -> tuple[str, list[Any]]:
    """`key=value,value,...` as given to an option, each value as in `--set`.

    >>> parse_axis("strategy.gamma=0.001,0.01"), parse_axis("model.hidden=[64],[64, 64]")
    (('strategy.gamma', [0.001, 0.01]), ('model.hidden', [[64], [64, 64]]))
    >>> parse_axis("model.name=mlp,cnn")
    ('model.name', ['mlp', 'cnn'])
    """
    key, separator, values = text.partition("=")
    if not separator or not all(key.strip().split(".")) or not all(part.strip() for part in values.split(",")):
        raise ConfigError(
            f"{option} takes KEY=VALUE,VALUE,..., such as {option} partition.alpha=10,1,0.5; '{text}' was given."
        )
    _, parsed = parse_override(f"grid=[{values}]")
    if isinstance(parsed, str):  # no TOML list: words without quotes
        parsed = [parse_override(f"grid={part}")[1] for part in values.split(",")]
    return key.strip(), parsed


def make_plan(
    base: ExperimentConfig,
    request: Request,
    *,
    name: str,
    reference: str | None = None,
    target: float | None = None,
    environment: Mapping[str, Any],
    value_of: CellValue = lambda cell: None,
) -> tuple[Plan, dict[str, ExperimentConfig]]:
    """The plan, and each cell's configuration by the cell's id; with a search, as far as the values of its cells reach.

    Raises:
        ConfigError: something asked for does not exist, is asked for twice, or cannot be compared.
    """
    _check(request)
    metric = base.metrics[0].rpartition(":")[2] if base.metrics else "loss"
    if reference is None:
        reference = "fedavg" if "fedavg" in request.strategies else request.strategies[0]
    if reference not in request.strategies:
        raise ConfigError(
            f"the reference '{reference}' is not among the strategies {', '.join(request.strategies)}."
            f"{nearest(reference, request.strategies)} Name one of them, or add it with --strategies."
        )
    if target is not None and not math.isfinite(target):
        raise ConfigError(f"the target {target} was given, but expected is a finite number, such as --target 0.9.")
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
        request=json.loads(json.dumps(asdict(request))),
        environment=environment,
    )
    if request.trials:
        return _tuned(base, request, plan, value_of)
    cells, cell_configs = _cells(base, request)
    return replace(plan, cells=tuple(cells)), cell_configs


def _cells(base: ExperimentConfig, request: Request) -> tuple[list[Cell], dict[str, ExperimentConfig]]:
    """All combinations of what was asked for."""
    shared = _validation(base, request)
    cells: list[Cell] = []
    words_of: dict[str, str] = {}  # digest -> the values that gave it
    configs: dict[str, ExperimentConfig] = {}
    for condition in products(request.condition_axes):
        for strategy in request.strategies:
            for choice in request.choices(strategy):
                own = _own(condition, strategy)  # without the settings that it does not have
                words = json.dumps([own, choice])
                changes = {"strategy.name": strategy, **shared, **_own(request.settings, strategy), **own, **choice}
                for seed in request.seeds:
                    config = base.replace(seed=seed, **changes)
                    cell = cell_of(config, condition, choice)
                    if words_of.setdefault(cell.digest, words) != words:
                        raise ConfigError(
                            f"the grid gives {strategy} the same configuration twice "
                            f"({', '.join(f'{key}={value}' for key, value in {**condition, **choice}.items())}); "
                            "name every value once."
                        )
                    cells.append(cell)
                    configs[cell.id] = config
    return cells, configs


def _tuned(
    base: ExperimentConfig, request: Request, plan: Plan, value_of: CellValue
) -> tuple[Plan, dict[str, ExperimentConfig]]:
    """The trials of all searches, batch by batch; once all have ended, the runs that count.

    A search is of one strategy under one condition, or under all conditions that differ only by what `tuning_settings` says.
    """
    conditions = products(request.condition_axes)
    fraction = _validation(base, request)
    searches = {}
    for condition in conditions:
        place = {**condition, **request.tuning_settings}
        for strategy in request.strategies:
            key = (strategy, json.dumps(place))
            if key not in searches:
                own = {**_own(request.settings, strategy), **_own(place, strategy)}
                searches[key] = search(
                    base.replace(**{"strategy.name": strategy, **fraction, **own}),
                    strategy,
                    place,
                    num=request.trials,
                    seeds=request.tuning_seeds,
                    given=_own(request.search, strategy),
                    higher_is_better=plan.higher_is_better,
                    value_of=value_of,
                )
    cells = [cell for each in searches.values() for cell in each.cells]
    cells.sort(
        key=lambda cell: (cell.trial or 0) // BATCH
    )  # stable: a plan's cells stay the first ones of what it becomes
    configs = {id: config for each in searches.values() for id, config in each.configs.items()}
    num_to_come = sum(each.num_to_come for each in searches.values())
    is_over = all(each.best is not None for each in searches.values())
    for condition, strategy, seed in itertools.product(conditions, request.strategies, request.seeds):
        own = {**_own(request.settings, strategy), **_own(condition, strategy)}
        choice = searches[strategy, json.dumps({**condition, **request.tuning_settings})].best or {}
        config = base.replace(
            seed=seed, **{"strategy.name": strategy, "data.validation_fraction": 0.0, **own, **choice}
        )
        if is_over:
            cells.append(cell := cell_of(config, condition, choice))
            configs[cell.id] = config
        else:
            num_to_come += 1
    tuning = {
        "labels": plan.labels,
        "trials": request.trials,
        "batch": BATCH,
        "seeds": list(request.tuning_seeds),
        "validation_fraction": fraction["data.validation_fraction"],
        "settings": dict(request.tuning_settings),
        "searches": [each.record for each in searches.values()],
        "num_to_come": num_to_come,
    }
    return replace(plan, cells=tuple(cells), tuning=json.loads(json.dumps(tuning))), configs


def _check(request: Request) -> None:
    """What can be said before any configuration is made."""
    if not request.strategies:
        raise ConfigError("no strategy was given; name some, such as --strategies fedavg,fedsign.")
    _check_unique("strategy", request.strategies)
    check_seeds(request.seeds)
    for strategy in request.strategies:
        resolve("strategy", strategy)
    for option, axes in (("--grid", request.grid), ("--by", request.by)):
        for key, values in axes.items():
            _check_key(key, request.strategies, option=option)
            _check_unique(f"value of {key}", [json.dumps(value) for value in values])
    for key in request.settings:
        _check_key(key, request.strategies, option="--set")
    _check_conditions(request)
    _check_tuning(request)


def _check_tuning(request: Request) -> None:
    """What a search is asked for, and what it does not go with."""
    if not request.trials:
        unused = {
            "--tune-seeds": request.tuning_seeds,
            "--search": request.search,
            "--tune-at": request.tuning_settings,
        }
        for option in (option for option, value in unused.items() if value):
            raise ConfigError(
                f"{option} was given without --tune; add --tune 16, the number of trials of each strategy."
            )
        return
    if request.trials < 1:
        raise ConfigError(
            f"--tune {request.trials} was given, but expected is how many trials each strategy gets, such as 16."
        )
    for key in (key for key in request.grid if _is_choice(key)):
        raise ConfigError(
            f"--grid {key} was given with --tune, which chooses by its own search; give a range with --search {key}=LOW..HIGH, or "
            "values to compare with --by."
        )
    check_tuning_seeds(request.tuning_seeds, request.seeds)
    check_search(request.search, request.strategies)
    for _, key in map(_scope, request.search):
        if key in request.condition_axes:
            raise ConfigError(f"'{key}' was given to --search and as a condition; give it to one of them.")
    for key in request.tuning_settings:
        _check_key(key, request.strategies, option="--tune-at")


def check_search(ranges: Mapping[str, str], strategies: Sequence[str]) -> None:
    """Raise ConfigError for a key that no search can be of."""
    for given in ranges:
        _, key = _scope(given)
        if key not in SHARED and (key.partition(".")[0] not in _CHOICES or key in ABLATIONS):
            raise ConfigError(
                f"--search {given} was given, but a search is of keys of {', '.join(_CHOICES)} that are no amount of training, and of "
                f"{', '.join(SHARED)}; compare values of others with --by."
            )
        _check_key(given, strategies, option="--search")


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise ConfigError unless there are some, each once."""
    if not seeds:
        raise ConfigError("no seed was given; expected is 1 or more, such as --seeds 5.")
    _check_unique("seed", seeds)


def check_tuning_seeds(tuning: Sequence[int], seeds: Sequence[int]) -> None:
    """Raise ConfigError unless the seeds of tuning are some, and none of those of the runs that count."""
    _check_unique("tuning seed", tuning)
    if not tuning:
        raise ConfigError("no tuning seed was given; expected is 1 or more, such as --tune-seeds 2.")
    if both := sorted({*tuning} & {*seeds}):
        raise ConfigError(
            f"seed {both[0]} is one of tuning and one of the runs that count, which no trial may have seen; give other --tune-seeds."
        )


def _check_unique(what: str, given: Sequence[Any]) -> None:
    for value, times in Counter(given).items():
        if times > 1:
            raise ConfigError(f"{what} '{value}' was given {times} times; name each {what} once.")


def _check_conditions(request: Request) -> None:
    """A condition is the same for all strategies, and said once."""
    for key in request.by:
        if _scope(key)[0] is not None:
            raise ConfigError(
                f"'{key}' cannot be given to --by: a condition is for all strategies; drop the strategy's name."
            )
        if key in request.grid:
            raise ConfigError(f"'{key}' was given to --grid and to --by; give it to one of them.")
    for given in (*request.grid, *request.settings):
        scope, key = _scope(given)
        if scope is not None and key in request.condition_axes:
            raise ConfigError(
                f"'{given}' was given, but {key} is a condition, which is the same for all strategies; drop the one or the other."
            )


def _check_key(given: str, strategies: Sequence[str], *, option: str) -> None:
    scope, key = _scope(given)
    section, _, setting = key.partition(".")
    for forbidden, remedy in _OTHERWISE.items():
        if (option != "--set" or scope or section == "strategy") and f"{key}.".startswith(f"{forbidden}."):
            raise ConfigError(f"'{given}' cannot be given to {option} of a comparison: {remedy}.")
    if scope is not None and scope not in strategies:
        raise ConfigError(
            f"'{given}' is for strategy '{scope}', which is not among {', '.join(strategies)}.{nearest(scope, strategies)}"
        )
    if scope is not None and section not in _CHOICES:
        raise ConfigError(
            f"'{given}' would give one strategy another {section}, so that nothing could be compared; only keys of "
            f"{', '.join(_CHOICES)} can be given for one strategy."
        )
    having = strategies if scope is None else [scope]
    if section == "strategy" and not any(_has(strategy, setting) for strategy in having):
        known = dict.fromkeys(name for strategy in having for name in plugins.names_of("strategy", strategy))
        raise ConfigError(
            f"'{given}': {'none' if len(having) > 1 else 'it is not a setting'} of {', '.join(having)}"
            f"{' has a setting ' + repr(setting) if len(having) > 1 else ''}.{plugins.suggest(setting, known)} "
            f"Known are {', '.join(known) or 'no settings'}."
        )


def _own(keyed: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """What applies to one strategy, under plain keys; what is given for it alone wins, at the place of the other."""
    found: dict[str, Any] = {}
    scoped = {}
    for given, value in keyed.items():
        scope, key = _scope(given)
        if scope == strategy:
            scoped[key] = value
        elif scope is None and (not key.startswith("strategy.") or _has(strategy, key.partition(".")[2])):
            found[key] = value
    return found | scoped


def _scope(given: str) -> tuple[str | None, str]:
    """The strategy that a key is for, and the plain key; a strategy's name may have a colon of its own."""
    scope, separator, key = given.rpartition(":")
    return (scope if separator else None), key


def _is_choice(given: str) -> bool:
    """What is given for one strategy alone cannot be a condition."""
    scope, key = _scope(given)
    return scope is not None or (key.partition(".")[0] in _CHOICES and key not in ABLATIONS)


def _has(strategy: str, setting: str) -> bool:
    """Whether a strategy's factory takes a setting."""
    model = plugins.settings_model("strategy", strategy, resolve("strategy", strategy))
    name = setting.partition(".")[0]
    return name in plugins.names_of("strategy", strategy) or model.model_config.get("extra") == "allow"


def _validation(base: ExperimentConfig, request: Request) -> dict[str, float]:
    """How much every cell holds out of training, so that all strategies train on the same samples."""
    fraction = request.validation_fraction
    has_choices = bool(request.trials) or any(len(request.choices(strategy)) > 1 for strategy in request.strategies)
    if fraction is None and has_choices:
        fraction = base.data.validation_fraction or VALIDATION_FRACTION
    if fraction is None:
        return {}
    if not 0 <= fraction < 1 or (has_choices and fraction == 0):
        raise ConfigError(
            f"a validation fraction of {fraction} was given, but expected is a number above 0 and below 1: "
            "hyper-parameters are chosen on the training samples that are held out."
        )
    return {"data.validation_fraction": fraction}


def _labels(strategies: Iterable[str]) -> dict[str, str]:
    """A short label for each strategy; its full name where two would share one."""
    labels = {strategy: strategy_label(strategy) for strategy in strategies}
    shared = [label for label in labels.values() if list(labels.values()).count(label) > 1]
    return {strategy: strategy if label in shared else label for strategy, label in labels.items()}
