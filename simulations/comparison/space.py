"""The search space of a strategy: its own settings, and those that all strategies share.

A range is written `LOW..HIGH`, `LOW..HIGH:log`, or as values separated by commas; a single value is fixed. `x0.1` is a
tenth of the experiment's value. A strategy declares the ranges of its own settings as `search_space`
(`fedsign.traits.StrategyTraits`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.overrides import parse_override
from fedsign.traits import StrategyTraits

SHARED: Mapping[str, str] = {
    "client.lr": "x0.1..x10:log",
    "client.optimizer.momentum": "0..0.95",
    "client.weight_decay": "1e-6..1e-2:log",
    "model.init_scale": "0.25..4:log",
    "server.optimizer.lr": "x0.1..x10:log",
}
"""Ranges shared by all strategies, as far as the experiment has the setting."""

_EXPECTED = "expected LOW..HIGH, LOW..HIGH:log or values with commas between them, such as client.lr=0.01..0.3:log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The values that a setting may take: an interval, or one of `values`."""

    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_integer: bool = False
    values: tuple[Any, ...] = ()

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that must be valid for all of the range to be valid."""
        return self.values or (self.typed(self.low), self.typed(self.high))

    @property
    def text(self) -> str:
        """The range as a user writes it."""
        if self.values:
            return ",".join(map(str, self.values))
        return f"{self.low:g}..{self.high:g}{':log' if self.is_log else ''}"

    def typed(self, value: Any) -> Any:
        """Convert a value to its setting's type; numbers are rounded to four digits."""
        if self.values:
            return value
        # four digits: readable in the table, and the same cell on every machine
        return round(value) if self.is_integer else float(f"{value:.4g}")

    def at(self, share: float) -> Any:
        """Return the value at a position from 0 to 1 along the range.

        >>> Range(low=0.01, high=1.0, is_log=True).at(0.5)
        0.1
        """
        if self.values:
            # share < 1
            return self.values[int(share * len(self.values))]
        if self.is_log:
            return self.typed(self.low * (self.high / self.low) ** share)
        return self.typed(self.low + share * (self.high - self.low))

    def nearest(self, value: Any) -> Any:
        """Return the value of the range nearest to another one, such as the experiment's own."""
        if self.values:
            return value if value in self.values else self.values[0]
        return min(max(value, self.low), self.high)


def space_of(config: ExperimentConfig, given: Mapping[str, str]) -> dict[str, Range]:
    """Return key -> range, shared ones first: the shared and the declared ranges, updated by `given`.

    Raises:
        ConfigError: it is not a range, or its ends are invalid values of the setting.
    """
    name = config.strategy.name
    declared = StrategyTraits.of(name).search_space or {}
    shared = {key: text for key, text in SHARED.items() if config.get(key, None) is not None}
    own = {f"strategy.{key}": text for key, text in declared.items()}
    space = {}
    for key, text in {**shared, **own, **given}.items():
        origin = f"search {key}={text}" if key in given or key in shared else f"search_space of strategy '{name}'"
        space[key] = parse_range(text, own=config.get(key, None), origin=origin)
        # the setting's own type decides what is valid
        for end in space[key].ends:
            try:
                config.replace(**{key: end})
            except ConfigError as error:
                raise ConfigError(f"{origin}: {error}") from error
        if config.get(key, None) is None:
            raise ConfigError(
                f"{origin} was given, but the experiment has no value there to begin with; add --set {key}=VALUE."
            )
    return space


def contained(config: ExperimentConfig, other: ExperimentConfig, given: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the settings at which an experiment nearly is another one; None if it is not, or `given` excludes them."""
    declared = StrategyTraits.of(config.strategy.name).special_case or {}
    if other.strategy.name not in declared:
        return None
    own, theirs = config.strategy.settings, other.strategy.settings
    is_same = config.model_dump(exclude={"strategy"}) == other.model_dump(exclude={"strategy"})
    if not is_same or any(own[key] != theirs[key] for key in own.keys() & theirs.keys()):
        return None
    settings = {f"strategy.{key}": value for key, value in declared[other.strategy.name].items()}
    ranges = {key: parse_range(given[key], own=config.get(key, None)) for key in settings.keys() & given.keys()}
    return settings if all(each.nearest(settings[key]) == settings[key] for key, each in ranges.items()) else None


def parse_range(text: str, *, own: Any = None, origin: str = "") -> Range:
    """Parse a range. `own` is the experiment's value, which `x` multiplies and which determines the type.

    >>> parse_range("x0.1..x10:log", own=0.05).text, parse_range("0.1,0.5").values
    ('0.005..0.5:log', (0.1, 0.5))
    >>> parse_range("1..8", own=2).is_integer
    True

    Raises:
        ConfigError: it is not a range.
    """
    origin = origin or f"search {text}"
    written = re.fullmatch(r"\s*(\S+?)\.\.(\S+?)(:log)?\s*", text)
    if written is None:
        values = [parse_override(f"value={part}")[1] for part in text.split(",")]
        if ".." in text or ":" in text or any(value in ("", [], {}) or isinstance(value, dict) for value in values):
            raise ConfigError(f"{origin} was given, but {_EXPECTED}.")
        return Range(values=tuple(values))
    low, high = (_number(word, own=own, origin=origin) for word in written.groups()[:2])
    is_log = written[3] is not None
    if low >= high or (is_log and low <= 0):
        above = ", and both above 0 with :log" if is_log else ""
        raise ConfigError(f"{origin} goes from {low:g} to {high:g}, but expected a low end below the high one{above}.")
    # by the experiment's value, not by the written range: "1..8" may be of a float
    is_integer = isinstance(own, int) and not isinstance(own, bool)
    return Range(low=low, high=high, is_log=is_log, is_integer=is_integer)


def _number(word: str, *, own: Any, origin: str) -> float:
    """Parse `0.1`, or `x0.1` as a multiple of the experiment's value."""
    try:
        value = float(word.removeprefix("x"))
    except ValueError as error:
        raise ConfigError(f"{origin} was given, but {_EXPECTED}.") from error
    if word.startswith("x"):
        if not isinstance(own, int | float) or not own > 0:
            raise ConfigError(f"{origin} multiplies the experiment's own value, which is {own}; give plain numbers.")
        # 0.1 x 0.05 is 0.005000000000000001 otherwise, on the page and in the plan
        value = float(f"{value * own:.4g}")
    if not math.isfinite(value):
        raise ConfigError(f"{origin} was given, but {_EXPECTED}.")
    return value
