"""How a comparison's parts are named and its numbers written, the same on the page, in figures and in LaTeX.

Numbers of one comparison have the same decimals everywhere, so that columns can be read downwards.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsign.intervals import Interval
from fedsign.report.wording import MISSING, NARROW_SPACE, setting

MINUS = "−"
PLUS_MINUS = "±"


def short_label(values: Mapping[str, Any]) -> str:
    """A condition or a choice for a human reader; empty for none.

    >>> short_label({"partition.alpha": 0.1, "model.name": "mlp"})
    'alpha 0.1, model mlp'
    >>> short_label({"client.lr": 0.1, "server.lr": 1.0})
    'client.lr 0.1, server.lr 1.0'
    """
    tails = {key: _tail(key) for key in values}
    times = Counter(tails.values())
    return ", ".join(
        f"{tail if times[tail] == 1 else key} {setting(values[key])}".strip() for key, tail in tails.items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How the metric's numbers are written: shares as percent, their differences as percentage points."""

    decimals: int
    percent: bool = False
    factor: float = 1.0  # from the metric to what is written
    unit: str = ""  # of a value; empty for a plain number

    def number(self, value: float | None) -> str:
        """A value without its unit."""
        if value is None or not math.isfinite(value):
            return MISSING
        form = ".2e" if abs(value) * self.factor >= 1e7 else f".{self.decimals}f"
        return f"{value * self.factor:{form}}".replace("-", MINUS)

    def with_unit(self, value: float | None) -> str:
        """A value with its unit, on one line."""
        return NARROW_SPACE.join(filter(None, [self.number(value), self.unit]))

    def spread(self, mean: float | None, std: float | None) -> str:
        """`97.62 ± 0.31`, or the mean alone where there is no deviation."""
        return self.number(mean) if std is None else f"{self.number(mean)} {PLUS_MINUS} {self.number(std)}"

    def signed(self, value: float | None) -> str:
        """A difference without its unit."""
        text = self.number(value)
        return text if value is None or text.startswith((MINUS, MISSING)) else f"+{text}"

    def interval(self, interval: Interval) -> str:
        """`+2.80 [+2.11, +3.49]`, or the mean alone where one pair has no interval."""
        if interval.low is None or interval.high is None:
            return self.signed(interval.mean)
        return f"{self.signed(interval.mean)} [{self.signed(interval.low)}, {self.signed(interval.high)}]"


def enumerate_words(words: Sequence[str]) -> str:
    """Words as in a sentence.

    >>> enumerate_words(["a"]), enumerate_words(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _tail(key: str) -> str:
    """The part of a dotted key that says what it is: the section, where the key only says that it is a name."""
    *sections, last = key.rsplit(".", 2)
    return sections[-1] if sections and last == "name" else last
