"""Checks of comparison and search requests, before any configuration is built. Each mistake is one sentence."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedsign import plugins
from fedsign.errors import ConfigError, nearest
from fedsign.registry import resolve
from simulations.comparison.request import ABLATIONS, CHOICES, Request, has_setting, is_choice, scope_of
from simulations.comparison.space import SHARED

_OTHERWISE = {
    "seed": "give the seeds with --seeds",
    "strategy.name": "give the strategies with --strategies",
    "data.validation_fraction": "give it with --validation-fraction",
    "name": "give the comparison's name with --name",
    "metrics": "every cell is judged by the same metric; set it with --set",
    "callbacks": "it changes no result",
    "results": "it changes no result",
}


def check(request: Request) -> None:
    """Raise ConfigError for components that do not exist, are given twice, or cannot be compared."""
    if not request.strategies:
        raise ConfigError("no strategy was given; name some, such as --strategies fedavg,fedsign.")
    _check_unique("strategy", request.strategies)
    check_seeds(request.seeds)
    for strategy in request.strategies:
        resolve("strategy", strategy)
    for option, axes in (("--grid", request.grid), ("--by", request.by)):
        for key, values in axes.items():
            _check_key(key, request.strategies, option=option)
            # as JSON: lists cannot be counted
            _check_unique(f"value of {key}", [json.dumps(value) for value in values])
    for key in request.settings:
        _check_key(key, request.strategies, option="--set")
    _check_conditions(request)
    _check_tuning(request)


def _check_tuning(request: Request) -> None:
    """Check the search options, and what they cannot be combined with."""
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
            f"--tune {request.trials} was given, but expected how many trials each strategy gets, such as 16."
        )
    # two selections at once: nobody could say how many trials each strategy had
    for key in (key for key in request.grid if is_choice(key)):
        raise ConfigError(
            f"--grid {key} was given with --tune, which chooses by its own search; give a range with --search "
            f"{key}=LOW..HIGH, or values to compare with --by."
        )
    check_tuning_seeds(request.tuning_seeds, request.seeds)
    check_search(request.search, request.strategies)
    for _, key in map(scope_of, request.search):
        if key in request.condition_axes:
            raise ConfigError(f"'{key}' was given to --search and as a condition; give it to one of them.")
    for key in request.tuning_settings:
        _check_key(key, request.strategies, option="--tune-at")


def check_search(ranges: Mapping[str, str], strategies: Sequence[str]) -> None:
    """Raise ConfigError for a key that cannot be searched."""
    for given in ranges:
        _, key = scope_of(given)
        if key not in SHARED and (key.partition(".")[0] not in CHOICES or key in ABLATIONS):
            raise ConfigError(
                f"--search {given} was given, but a search is of keys of {', '.join(CHOICES)} that are no amount of "
                f"training, and of {', '.join(SHARED)}; compare values of others with --by."
            )
        _check_key(given, strategies, option="--search")


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise ConfigError unless there are seeds, without duplicates."""
    if not seeds:
        raise ConfigError("no seed was given; expected 1 or more, such as --seeds 5.")
    _check_unique("seed", seeds)


def check_tuning_seeds(tuning: Sequence[int], seeds: Sequence[int]) -> None:
    """Raise ConfigError unless there are tuning seeds, disjoint from the seeds of the results."""
    _check_unique("tuning seed", tuning)
    if not tuning:
        raise ConfigError("no tuning seed was given; expected 1 or more, such as --tune-seeds 2.")
    if both := sorted({*tuning} & {*seeds}):
        raise ConfigError(
            f"seed {both[0]} is one of tuning and one of the runs that count, which no trial may have seen; give "
            "other --tune-seeds."
        )


def _check_unique(kind: str, given: Sequence[Any]) -> None:
    for value, times in Counter(given).items():
        if times > 1:
            raise ConfigError(f"{kind} '{value}' was given {times} times; name each {kind} once.")


def _check_conditions(request: Request) -> None:
    """Check that conditions are the same for all strategies, and given once."""
    for key in request.by:
        if scope_of(key)[0] is not None:
            raise ConfigError(
                f"'{key}' cannot be given to --by: a condition is for all strategies; drop the strategy's name."
            )
        if key in request.grid:
            raise ConfigError(f"'{key}' was given to --grid and to --by; give it to one of them.")
    for given in (*request.grid, *request.settings):
        scope, key = scope_of(given)
        if scope is not None and key in request.condition_axes:
            raise ConfigError(
                f"'{given}' was given, but {key} is a condition, which is the same for all strategies; drop the one "
                "or the other."
            )


def _check_key(given: str, strategies: Sequence[str], *, option: str) -> None:
    scope, key = scope_of(given)
    section, _, setting = key.partition(".")
    # A plain --set goes to the base experiment, which may have all of these. The dots spare keys that only begin alike.
    for forbidden, remedy in _OTHERWISE.items():
        if (option != "--set" or scope or section == "strategy") and f"{key}.".startswith(f"{forbidden}."):
            raise ConfigError(f"'{given}' cannot be given to {option} of a comparison: {remedy}.")
    if scope is not None and scope not in strategies:
        raise ConfigError(
            f"'{given}' is for strategy '{scope}', which is not among "
            f"{', '.join(strategies)}.{nearest(scope, strategies)}"
        )
    if scope is not None and section not in CHOICES:
        raise ConfigError(
            f"'{given}' would give one strategy another {section}, so that nothing could be compared; only keys of "
            f"{', '.join(CHOICES)} can be given for one strategy."
        )
    having = strategies if scope is None else [scope]
    if section == "strategy" and not any(has_setting(strategy, setting) for strategy in having):
        known = dict.fromkeys(name for strategy in having for name in plugins.names_of("strategy", strategy))
        raise ConfigError(
            f"'{given}': {'none' if len(having) > 1 else 'it is not a setting'} of {', '.join(having)}"
            f"{' has a setting ' + repr(setting) if len(having) > 1 else ''}.{plugins.suggest(setting, known)} "
            f"Known are {', '.join(known) or 'no settings'}."
        )
