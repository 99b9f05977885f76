"""What a recipe is: a claim, figures to measure, thresholds fixed beforehand, and a computed verdict.

A claim is the whole sentence of its source, cut into parts that can fail by themselves.  It `holds` if every part does,
`holds in part` if some do, and `does not hold` if none does.  It is `not decidable here` if the figures cannot be
measured on this machine, or if one of the conditions is not met under which they say anything.

A recipe records the verdict that its last full measurement gave, and fails if it gives another one.  Where nobody has
measured there is nothing to expect.  `null` says what the figures are where the claim is false in every part, as when
methods do alike or signs do not matter: a test judges it, so that no threshold is met by whatever is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

from fedsign.errors import DataError
from simulations.recipes.where import AT_HOME, PlaysOf, Where

Figures = Mapping[str, float]


Shown = tuple[Figures, Path]
"""Figures with a page or a picture of them."""

Measure = Callable[..., Figures | Shown]
"""Takes `quick`; that of a recipe with a choice of data and model also `where`."""


class Verdict(StrEnum):
    """The verdict on a claim; a quick check only says whether something is broken."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    DOES_NOT_HOLD = "does not hold"
    NOT_DECIDABLE = "not decidable here"
    PASSED = "quick check passed"
    FAILED = "quick check failed"


class NotDecidableHere(Exception):
    """Raised by a recipe that lacks something on this machine; says what."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One condition on one figure: from `low` to `high`, as `condition` says it; `strict` leaves out the ends."""

    figure: str
    condition: str
    low: float = -inf
    high: float = inf
    strict: bool = False

    def is_met(self, figures: Figures) -> bool:
        """Whether the figure satisfies the condition; NaN, or a figure that is missing, never does."""
        value = figures.get(self.figure, float("nan"))
        return self.low < value < self.high if self.strict else self.low <= value <= self.high


def at_least(value: float, *figures: str) -> list[Threshold]:
    """figure >= value, for each of some figures."""
    return [Threshold(figure, f"at least {value:g}", low=value) for figure in figures]


def at_most(value: float, *figures: str) -> list[Threshold]:
    """figure <= value."""
    return [Threshold(figure, f"at most {value:g}", high=value) for figure in figures]


def above(value: float, *figures: str) -> list[Threshold]:
    """figure > value: a difference above 0 is not met by two that are equal."""
    return [Threshold(figure, f"above {value:g}", low=value, strict=True) for figure in figures]


def below(value: float, *figures: str) -> list[Threshold]:
    """figure < value."""
    return [Threshold(figure, f"below {value:g}", high=value, strict=True) for figure in figures]


def within(value: float, tolerance: float, *figures: str) -> list[Threshold]:
    """|figure - value| <= tolerance."""
    low, high = value - tolerance, value + tolerance
    return [Threshold(figure, f"{value:g} ± {tolerance:g}", low, high) for figure in figures]


@dataclass(frozen=True, slots=True)
class Part:
    """One sentence of a claim, and the thresholds that decide it."""

    says: str
    thresholds: Sequence[Threshold]

    def holds(self, figures: Figures) -> bool:
        """Whether all of its thresholds are met."""
        return all(threshold.is_met(figures) for threshold in self.thresholds)


def part(says: str, *thresholds: Sequence[Threshold]) -> Part:
    """A part of a claim."""
    return Part(says, tuple(chain(*thresholds)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A claim and how to check it.

    Args:
        source: who claims it, and where: "FedSign, Figure 4"; empty for a claim of this program.
        given: what has to be so for the figures to say anything, such as that every run ended.
        quick_thresholds: of a check with fewer seeds that finds something broken; without them, all of the claim's.
        null: figures where the claim is false in every part.
        expected: the verdict of the last full measurement; None where there was none.
        data: the sets it was made for, the default first, with the verdict expected on each; empty if it was made for
            `home` alone.
        home: the set that `expected` is of, for a recipe that can be played on others as well.
        plays: what it plays, for one that can be played on any data; None for one that cannot.
        takes_model: whether another model may be asked for, where other data may.
        takes_other_data: whether `data` are examples; otherwise the figures are published on them, and say nothing elsewhere.
        where: on which data and with which model it is to be played.
    """

    name: str
    claim: str
    measure: Measure
    parts: Sequence[Part]
    source: str = ""
    given: Sequence[Threshold] = ()
    quick_thresholds: Sequence[Threshold] = ()
    null: Figures = field(default_factory=dict)
    expected: Verdict | None = None
    data: Mapping[str, Verdict | None] = field(default_factory=dict)
    home: str = "digits"
    plays: PlaysOf | None = None
    takes_model: bool = True
    takes_other_data: bool = True
    where: Where = AT_HOME

    @property
    def thresholds(self) -> list[Threshold]:
        """Those of all parts."""
        return [threshold for each in self.parts for threshold in each.thresholds]

    def check(self, *, quick: bool = False) -> "Finding":
        """Measure and judge."""
        try:
            measured = self.measure(quick)
        except NotDecidableHere as lacking:
            return Finding(recipe=self, quick=quick, reason=str(lacking))
        except DataError as error:
            return Finding(recipe=self, quick=quick, reason=f"{error} For a recipe, the folder is --data-root.")
        figures, page = measured if isinstance(measured, tuple) else (measured, None)
        return Finding(recipe=self, quick=quick, figures=figures, page=page)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The figures that a recipe measured, judged by its thresholds; or the `reason` why it could not measure them."""

    recipe: Recipe
    quick: bool
    figures: Figures = field(default_factory=dict)
    page: Path | None = None  # or a picture; of the figures
    reason: str = ""

    @property
    def thresholds(self) -> Sequence[Threshold]:
        """Those that judge: what has to be given, and the claim's or the quick check's own."""
        own = self.recipe.quick_thresholds if self.quick else ()
        return [*self.recipe.given, *(own or self.recipe.thresholds)]

    @property
    def verdict(self) -> Verdict:
        """By the thresholds."""
        if self.reason:
            return Verdict.NOT_DECIDABLE
        if self.quick:
            met = all(threshold.is_met(self.figures) for threshold in self.thresholds)
            return Verdict.PASSED if met else Verdict.FAILED
        if not all(threshold.is_met(self.figures) for threshold in self.recipe.given):
            return Verdict.NOT_DECIDABLE
        holding = [each.holds(self.figures) for each in self.recipe.parts]
        if all(holding):
            return Verdict.HOLDS
        return Verdict.IN_PART if any(holding) else Verdict.DOES_NOT_HOLD

    @property
    def expected(self) -> Verdict | None:
        """What was measured before; of a quick check, that it passes."""
        return Verdict.PASSED if self.quick else self.recipe.expected

    @property
    def as_expected(self) -> bool:
        """Whether the verdict is the recorded one; without a record, whether there is a verdict at all."""
        if self.expected is None:
            return self.verdict is not Verdict.NOT_DECIDABLE
        return self.verdict is self.expected

    def rows(self) -> list[dict[str, str]]:
        """A table: one row for every threshold of a figure."""
        rows = []
        for name, measured in self.figures.items():
            conditions = [each for each in self.thresholds if each.figure == name]
            verdicts = [(each.condition, "yes" if each.is_met(self.figures) else "no") for each in conditions]
            for condition, met in verdicts or [("", "")]:
                rows.append({"figure": name, "measured": f"{measured:.4g}", "threshold": condition, "met": met})
        return rows

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        judged = [] if self.quick or self.reason else self.recipe.parts
        return {
            "name": self.recipe.name,
            "source": self.recipe.source,
            "claim": self.recipe.claim,
            "quick": self.quick,
            "figures": self.figures,
            "thresholds": [
                {"figure": each.figure, "condition": each.condition, "met": each.is_met(self.figures)}
                for each in self.thresholds
                if each.figure in self.figures
            ],
            "parts": [{"says": each.says, "holds": each.holds(self.figures)} for each in judged],
            "verdict": self.verdict,
            "expected": self.expected,
            "reason": self.reason,
            "page": None if self.page is None else str(self.page),
        }


def recipe(
    claim: str, *parts: Part, quick: Sequence[Sequence[Threshold]] = (), **options: Any
) -> Callable[..., Recipe]:
    """Make a function that measures a recipe, called like the function: `valley_bn_init` is `valley-bn-init`."""

    def made(measure: Measure) -> Recipe:
        return Recipe(
            name=measure.__name__.replace("_", "-"),
            claim=claim,
            measure=measure,
            parts=parts,
            quick_thresholds=tuple(chain(*quick)),
            **options,
        )

    return made
