"""What a recipe is: a claim, figures to measure, thresholds fixed beforehand, and a computed verdict.

The verdict is `holds` if every threshold is met, `does not hold` if one is not, `not decidable here` if
the figures cannot be measured on this machine.  Each recipe records the verdict that it is expected to
give; a claim of a paper that fails honestly is expected to `not hold`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

Figures = Mapping[str, float]


class Verdict(StrEnum):
    """The three outcomes."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    NOT_DECIDABLE = "not decidable here"


class NotDecidableHere(Exception):
    """Raised by a recipe that lacks something on this machine; says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """One condition on one figure."""

    figure: str
    bound: Literal["at least", "at most", "within"]
    value: float
    tolerance: float = 0.0  # for `within`

    def is_met(self, figures: Figures) -> bool:
        """Whether the figure satisfies the condition; NaN never does."""
        measured = figures[self.figure]
        match self.bound:
            case "at least":
                return measured >= self.value
            case "at most":
                return measured <= self.value
            case "within":
                return abs(measured - self.value) <= self.tolerance
            case _:
                raise ValueError(f"bound={self.bound!r}; expected 'at least', 'at most' or 'within'.")

    def __str__(self) -> str:
        if self.bound == "within":
            return f"{self.value:g} ± {self.tolerance:g}"
        return f"{self.bound} {self.value:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a recipe found."""

    name: str
    claim: str
    quick: bool
    figures: Figures
    thresholds: tuple[Threshold, ...]
    verdict: Verdict
    expected: Verdict
    reason: str = ""
    page: Path | None = None  # what there is to see

    @property
    def as_expected(self) -> bool:
        """Whether the verdict is the one the recipe records."""
        return self.verdict is self.expected

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(figure, measured, threshold, met) for a table: one row for every threshold of a figure."""
        rows = []
        for name, measured in self.figures.items():
            conditions = [threshold for threshold in self.thresholds if threshold.figure == name]
            verdicts = [(str(each), "yes" if each.is_met(self.figures) else "no") for each in conditions]
            rows += [(name, f"{measured:.4g}", *verdict) for verdict in verdicts or [("", "")]]
        return rows

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "name": self.name,
            "claim": self.claim,
            "quick": self.quick,
            "figures": dict(self.figures),
            "thresholds": [
                {"figure": item.figure, "condition": str(item), "met": item.is_met(self.figures)}
                for item in self.thresholds
                if item.figure in self.figures
            ],
            "verdict": str(self.verdict),
            "expected": str(self.expected),
            "reason": self.reason,
            "page": None if self.page is None else str(self.page),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A claim and how to check it.  `quick_thresholds` are for fewer seeds; without them, the same.

    `data` are the data sets that it can be checked on, the first one if nothing is said; empty for a recipe
    that has no choice.  `page`: where what it plays can be seen.
    """

    name: str
    claim: str
    measure: Callable[[bool], Figures]
    thresholds: tuple[Threshold, ...]
    quick_thresholds: tuple[Threshold, ...] | None = None
    expected: Verdict = Verdict.HOLDS
    data: tuple[str, ...] = ()
    page: Callable[[bool], Path] | None = None

    def check(self, *, quick: bool = False) -> Finding:
        """Measure and judge."""
        thresholds, expected = self.thresholds, self.expected
        if quick and self.quick_thresholds is not None:  # these say that nothing is broken, whatever the claim's fate
            thresholds, expected = self.quick_thresholds, Verdict.HOLDS
        figures: Figures = {}
        reason = ""
        try:
            figures = self.measure(quick)
            met = all(threshold.is_met(figures) for threshold in thresholds)
            verdict = Verdict.HOLDS if met else Verdict.DOES_NOT_HOLD
        except NotDecidableHere as lacking:
            verdict, reason = Verdict.NOT_DECIDABLE, str(lacking)
        return Finding(
            name=self.name,
            claim=self.claim,
            quick=quick,
            figures=figures,
            thresholds=thresholds,
            verdict=verdict,
            expected=expected,
            reason=reason,
            page=self.page(quick) if self.page is not None and verdict is not Verdict.NOT_DECIDABLE else None,
        )
