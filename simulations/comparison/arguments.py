"""What `compare` takes from Python, checked for its types before anything is made of it.

The command line gives the right types by itself; a script may give anything.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, StrictFloat, StrictInt, TypeAdapter, ValidationError

from fedsign.errors import ConfigError

MAX_SEEDS = 10_000
TUNING_SEEDS = 1_000_000  # the first, besides the experiment's own: far from those that count


def _integer(value: Any) -> int:
    """Of any library's integer type; True is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(value)
    return operator.index(value)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else value


Whole = Annotated[int, BeforeValidator(_integer)]
Number = StrictInt | StrictFloat  # neither True nor "0.5"
Names = Annotated[list[str], BeforeValidator(_listed)]
_Seeds = Whole | Annotated[list[Whole], BeforeValidator(_listed)]


def checked(what: str, given: Any, kind: Any, expected: str) -> Any:
    """An argument as a type that pydantic knows.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        raise ConfigError(f"{what}={given!r} was given, but expected is {expected}.") from error


def seeds_of(given: Any, *, first: int) -> Sequence[int]:
    """A number of seeds, or the seeds themselves.

    Raises:
        ConfigError: neither, or more than `MAX_SEEDS`.
    """
    seeds = checked("seeds", given, _Seeds, "how many, such as 5, or which, such as [0, 3, 7]")
    number = seeds if isinstance(seeds, int) else len(seeds)
    if number > MAX_SEEDS:
        raise ConfigError(f"{number} seeds were given, but expected are {MAX_SEEDS} at most; five to ten are usual.")
    return list(range(first, first + number)) if isinstance(seeds, int) else seeds


def tuning_seeds_of(given: Any, *, first: int) -> Sequence[int]:
    """The seeds of a search's trials: far from those that count, unless they are given one by one."""
    return seeds_of(given, first=TUNING_SEEDS + first)


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
    return _plain(what, axes)


def settings_of(given: Any) -> dict[str, Any]:
    """Key -> value.

    Raises:
        ConfigError: it is something else.
    """
    return _plain("settings", _table("settings", given, 'settings={"rounds": 60}'))


def _table(what: str, given: Any, example: str) -> dict[str, Any]:
    expected = f"a dictionary with the keys of a configuration, such as {example}"
    table: dict[str, Any] = checked(what, given or {}, dict[str, Any], expected)
    return table


def _plain(what: str, table: dict[str, Any]) -> dict[str, Any]:
    """The plan is written as JSON, and a configuration as TOML."""
    for key, value in table.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{what}: '{key}' was given {value!r}; expected are plain numbers, strings, lists and dictionaries."
            ) from error
    return table
