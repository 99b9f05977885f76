"""What a recipe is: a claim, figures to measure, thresholds fixed beforehand, and a computed verdict.

The verdict is `holds` if every threshold is met, `does not hold` if one is not, `not decidable here` if
the figures cannot be measured on this machine.  Each recipe records the verdict that it is expected to
give; a claim of a paper that fails honestly is expected to `not hold`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

Figures = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """Figures with a page or a picture of them."""

    figures: Figures
    page: Path


Measure = Callable[..., Figures | Shown]
"""Takes `quick`; that of a recipe with several data sets also `data`, and the folder `root` of its files."""


class Verdict(StrEnum):
    """The three outcomes."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    NOT_DECIDABLE = "not decidable here"


class NotDecidableHere(Exception):
    """Raised by a recipe that lacks something on this machine; says what."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One condition on one figure: from `low` to `high`, as `condition` says it."""

    figure: str
    condition: str
    low: float = -inf
    high: float = inf

    def is_met(self, figures: Figures) -> bool:
        """Whether the figure satisfies the condition; NaN never does."""
        return self.low <= figures[self.figure] <= self.high


def at_least(value: float, *figures: str) -> list[Threshold]:
    """figure >= value, for each of some figures."""
    return [Threshold(figure, f"at least {value:g}", low=value) for figure in figures]


def at_most(value: float, *figures: str) -> list[Threshold]:
    """figure <= value."""
    return [Threshold(figure, f"at most {value:g}", high=value) for figure in figures]


def within(value: float, tolerance: float, *figures: str) -> list[Threshold]:
    """|figure - value| <= tolerance."""
    low, high = value - tolerance, value + tolerance
    return [Threshold(figure, f"{value:g} ± {tolerance:g}", low, high) for figure in figures]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a recipe found."""

    name: str
    claim: str
    quick: bool
    figures: Figures
    thresholds: Sequence[Threshold]
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
            verdicts = [(each.condition, "yes" if each.is_met(self.figures) else "no") for each in conditions]
            rows += [(name, f"{measured:.4g}", *verdict) for verdict in verdicts or [("", "")]]
        return rows

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        thresholds = [
            {"figure": each.figure, "condition": each.condition, "met": each.is_met(self.figures)}
            for each in self.thresholds
            if each.figure in self.figures
        ]
        return asdict(self) | {"thresholds": thresholds, "page": None if self.page is None else str(self.page)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A claim and how to check it.

    `quick_thresholds` are for fewer seeds; without them, the same.  `data`: the data sets it can be checked on, the default
    first, with the verdict expected on each; empty for a recipe without a choice.
    """

    name: str
    claim: str
    measure: Measure
    thresholds: Sequence[Threshold]
    quick_thresholds: Sequence[Threshold] = ()
    expected: Verdict = Verdict.HOLDS
    data: Mapping[str, Verdict] = field(default_factory=dict)

    def check(self, *, quick: bool = False) -> Finding:
        """Measure and judge."""
        thresholds, expected = self.thresholds, self.expected
        if quick and self.quick_thresholds:  # these say that nothing is broken, whatever the claim's fate
            thresholds, expected = self.quick_thresholds, Verdict.HOLDS
        figures: Figures = {}
        page, reason = None, ""
        try:
            measured = self.measure(quick)
            figures, page = (measured.figures, measured.page) if isinstance(measured, Shown) else (measured, None)
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
            page=page,
        )


def recipe(
    claim: str, *thresholds: Sequence[Threshold], quick: Sequence[Sequence[Threshold]] = (), **options: Any
) -> Callable[[Measure], Recipe]:
    """Make a function that measures a recipe, called like the function: `valley_bn_init` is `valley-bn-init`."""

    def made(measure: Measure) -> Recipe:
        return Recipe(
            name=measure.__name__.replace("_", "-"),
            claim=claim,
            measure=measure,
            thresholds=tuple(chain(*thresholds)),
            quick_thresholds=tuple(chain(*quick)),
            **options,
        )

    return made
