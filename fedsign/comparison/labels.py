"""Names and numbers of a comparison as text, the same on the page, in figures and in LaTeX.

All numbers of a comparison have the same number of decimals, so columns align.
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
    """A condition or a choice as readable text; empty for none.

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
    """The number format of a metric: shares in percent, their differences in percentage points."""

    decimals: int
    percent: bool = False
    factor: float = 1.0  # from the metric to the written number
    unit: str = ""  # empty for a plain number

    def number(self, value: float | None) -> str:
        """A value without its unit."""
        if value is None or not math.isfinite(value):
            return MISSING
        form = ".2e" if abs(value) * self.factor >= 1e7 else f".{self.decimals}f"
        return f"{value * self.factor:{form}}".replace("-", MINUS)

    def with_unit(self, value: float | None) -> str:
        """A value with its unit, joined by a narrow no-break space."""
        return NARROW_SPACE.join(filter(None, [self.number(value), self.unit]))

    def mean_and_std(self, mean: float | None, std: float | None) -> str:
        """`97.62 ± 0.31`, or the mean alone without a deviation."""
        return self.number(mean) if std is None else f"{self.number(mean)} {PLUS_MINUS} {self.number(std)}"

    def signed(self, value: float | None) -> str:
        """A difference with its sign, without its unit."""
        text = self.number(value)
        return text if value is None or text.startswith((MINUS, MISSING)) else f"+{text}"

    def interval(self, interval: Interval) -> str:
        """`+2.80 [+2.11, +3.49]`, or the mean alone without an interval."""
        if interval.low is None or interval.high is None:
            return self.signed(interval.mean)
        return f"{self.signed(interval.mean)} [{self.signed(interval.low)}, {self.signed(interval.high)}]"


def enumerate_words(words: Sequence[str]) -> str:
    """Words as an enumeration in a sentence.

    >>> enumerate_words(["a"]), enumerate_words(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _tail(key: str) -> str:
    """The last part of a dotted key; its section, if the last part is just `name`."""
    *sections, last = key.rsplit(".", 2)
    return sections[-1] if sections and last == "name" else last
