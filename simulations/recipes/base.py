"""What a recipe is: a claim, figures to measure, thresholds fixed beforehand, and a computed verdict.

The verdict is `holds` if every threshold is met, `does not hold` if one is not, `not decidable here` if
the figures cannot be measured on this machine.  Each recipe records the verdict that it is expected to
give; a claim of a paper that fails honestly is expected to `not hold`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

Figures = Mapping[str, float]


Shown = tuple[Figures, Path]
"""Figures with a page or a picture of them."""

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

    def check(self, *, quick: bool = False) -> "Finding":
        """Measure and judge."""
        judged = self
        if quick and self.quick_thresholds:  # these say that nothing is broken, whatever the claim's fate
            judged = replace(self, thresholds=self.quick_thresholds, expected=Verdict.HOLDS)
        try:
            measured = self.measure(quick)
        except NotDecidableHere as lacking:
            return Finding(recipe=judged, quick=quick, reason=str(lacking))
        figures, page = measured if isinstance(measured, tuple) else (measured, None)
        return Finding(recipe=judged, quick=quick, figures=figures, page=page)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The figures that a recipe measured, judged by the recipe's thresholds; or the `reason` why it could not measure them here."""

    recipe: Recipe
    quick: bool
    figures: Figures = field(default_factory=dict)
    page: Path | None = None  # or a picture; of the figures
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """By the thresholds."""
        if self.reason:
            return Verdict.NOT_DECIDABLE
        met = all(threshold.is_met(self.figures) for threshold in self.recipe.thresholds)
        return Verdict.HOLDS if met else Verdict.DOES_NOT_HOLD

    @property
    def as_expected(self) -> bool:
        """Whether the verdict is the one the recipe records."""
        return self.verdict is self.recipe.expected

    def rows(self) -> list[dict[str, str]]:
        """A table: one row for every threshold of a figure."""
        rows = []
        for name, measured in self.figures.items():
            conditions = [each for each in self.recipe.thresholds if each.figure == name]
            verdicts = [(each.condition, "yes" if each.is_met(self.figures) else "no") for each in conditions]
            for condition, met in verdicts or [("", "")]:
                rows.append({"figure": name, "measured": f"{measured:.4g}", "threshold": condition, "met": met})
        return rows

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "name": self.recipe.name,
            "claim": self.recipe.claim,
            "quick": self.quick,
            "figures": self.figures,
            "thresholds": [
                {"figure": each.figure, "condition": each.condition, "met": each.is_met(self.figures)}
                for each in self.recipe.thresholds
                if each.figure in self.figures
            ],
            "verdict": self.verdict,
            "expected": self.recipe.expected,
            "reason": self.reason,
            "page": None if self.page is None else str(self.page),
        }


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
