"""What `compare` takes from Python, checked for its types before anything is made of it.

The command line gives the right types by itself; a script may give anything.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsign.errors import ConfigError

MAX_SEEDS = 10_000


def strategies_of(given: Any) -> tuple[str, ...]:
    """The strategies' names.

    Raises:
        ConfigError: it is no list of names; a single name without a list is a mistake too.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise _unlike("strategies", given, 'a list of names, such as ["fedavg", "fedsign"]')
    names = tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise _unlike("strategies", list(names), "a list of names; an algorithm of your own is named 'module:Name'")
    return names


def seeds_of(given: Any, *, first: int) -> tuple[int, ...]:
    """A number of seeds, or the seeds themselves.

    Raises:
        ConfigError: neither, or more than `MAX_SEEDS`.
    """
    number = _integer(given)
    if number is not None:
        _check_number(number)
        return tuple(range(first, first + number))
    expected = "how many, such as 5, or which, such as [0, 3, 7]"
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise _unlike("seeds", given, expected)
    listed = list(given)
    seeds = [seed for seed in map(_integer, listed) if seed is not None]
    if len(seeds) < len(listed):
        raise _unlike("seeds", listed, expected)
    _check_number(len(seeds))
    return tuple(seeds)


def axes_of(what: str, given: Any) -> dict[str, Any]:
    """Key -> values, of `grid` or `by`.

    Raises:
        ConfigError: it is something else.
    """
    table = _table(what, given, f'{what}={{"partition.alpha": [10, 1, 0.5]}}')
    axes = {key: list(values) if isinstance(values, tuple | range) else values for key, values in table.items()}
    for key, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"{what}: '{key}' has no values; expected is a list of one or more.")
    _check_plain(what, axes)
    return axes


def settings_of(given: Any) -> dict[str, Any]:
    """Key -> value.

    Raises:
        ConfigError: it is something else.
    """
    table = _table("settings", given, 'settings={"rounds": 60}')
    _check_plain("settings", table)
    return table


def check_others(*, target: Any, validation_fraction: Any, workers: Any, reference: Any, out: Any) -> None:
    """Raise ConfigError for a number that is none, and for a name or a path that is none."""
    for what, number in (("target", target), ("validation_fraction", validation_fraction)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise _unlike(what, number, "a number, such as 0.5")
    if workers is not None and _integer(workers) is None:
        raise _unlike("workers", workers, "a whole number, 1 or more")
    if reference is not None and not isinstance(reference, str):
        raise _unlike("reference", reference, "the name of one of the strategies")
    if out is not None and not isinstance(out, str | Path):
        raise _unlike("out", out, "the path of a folder")


def _table(what: str, given: Any, example: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise _unlike(what, given, f"a dictionary with the keys of a configuration, such as {example}")
    return dict(given)


def _check_plain(what: str, table: Mapping[str, Any]) -> None:
    """The plan is written as JSON, and a configuration as TOML."""
    for key, value in table.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{what}: '{key}' was given {value!r}; expected are plain numbers, strings, lists and dictionaries."
            ) from error


def _integer(value: Any) -> int | None:
    """A whole number of any library's integer type; True is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _check_number(number: int) -> None:
    if number > MAX_SEEDS:
        raise ConfigError(f"{number} seeds were given, but expected are {MAX_SEEDS} at most; five to ten are usual.")


def _unlike(what: str, given: Any, expected: str) -> ConfigError:
    return ConfigError(f"{what}={given!r} was given, but expected is {expected}.")
