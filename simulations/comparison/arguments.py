"""Type checks of the arguments that `compare` takes from Python.

The command line converts its options itself; a script may pass anything.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, StrictFloat, StrictInt, TypeAdapter, ValidationError

from fedsign.errors import ConfigError

MAX_SEEDS = 10_000
TUNING_SEEDS = 1_000_000  # added to the experiment's seed: far from the seeds of the results


def _integer(value: Any) -> int:
    """Accept the integers of any library, but no bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(value)
    return operator.index(value)


def _listed(value: Any) -> Any:
    # a text is iterable, too: strategies="fedavg" must not become six names
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else value


Whole = Annotated[int, BeforeValidator(_integer)]
Number = StrictInt | StrictFloat  # excludes True and "0.5"
Names = Annotated[list[str], BeforeValidator(_listed)]
_Seeds = Whole | Annotated[list[Whole], BeforeValidator(_listed)]


def checked(name: str, given: Any, kind: Any, expected: str) -> Any:
    """Validate an argument against a pydantic type.

    Raises:
        ConfigError: it has another type.
    """
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        raise ConfigError(f"{name}={given!r} was given, but expected {expected}.") from error


def seeds_of(given: Any, *, first: int) -> Sequence[int]:
    """Return the seeds, given as a number of seeds or one by one.

    Raises:
        ConfigError: it is neither, or there are more than `MAX_SEEDS`.
    """
    seeds = checked("seeds", given, _Seeds, "how many, such as 5, or which, such as [0, 3, 7]")
    number = seeds if isinstance(seeds, int) else len(seeds)
    if number > MAX_SEEDS:
        raise ConfigError(f"{number} seeds were given, but expected {MAX_SEEDS} at most; five to ten are usual.")
    return list(range(first, first + number)) if isinstance(seeds, int) else seeds


def tuning_seeds_of(given: Any, *, first: int) -> Sequence[int]:
    """Return the seeds of a search's trials, far from those of the results unless given one by one."""
    return seeds_of(given, first=TUNING_SEEDS + first)


def axes_of(name: str, given: Any) -> dict[str, Any]:
    """Validate `grid` or `by`: key -> values.

    Raises:
        ConfigError: it has another type.
    """
    table = _table(name, given, f'{name}={{"partition.alpha": [10, 1, 0.5]}}')
    axes = {key: list(values) if isinstance(values, tuple | range) else values for key, values in table.items()}
    for key, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"{name}: '{key}' has no values; expected a list of one or more.")
    return _plain(name, axes)


def settings_of(given: Any) -> dict[str, Any]:
    """Validate `settings`: key -> value.

    Raises:
        ConfigError: it has another type.
    """
    return _plain("settings", _table("settings", given, 'settings={"rounds": 60}'))


def _table(name: str, given: Any, example: str) -> dict[str, Any]:
    expected = f"a dictionary with the keys of a configuration, such as {example}"
    table: dict[str, Any] = checked(name, given or {}, dict[str, Any], expected)
    return table


def _plain(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """Convert values to plain types, since plans are stored as JSON and configurations as TOML."""
    for key, value in table.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{name}: '{key}' was given {value!r}; expected plain numbers, strings, lists and dictionaries."
            ) from error
    return table
