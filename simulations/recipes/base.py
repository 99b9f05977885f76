"""What a recipe is: a claim, metrics to measure, thresholds fixed in advance, and a computed verdict.

A claim is the complete sentence of its source, split into parts that can fail separately. It `holds` if every part
does, `holds in part` if some do, and `does not hold` if none does. It is `not decidable here` if the metrics cannot be
measured on this machine, or if a precondition for interpreting them fails.

A recipe records the verdict of its last full measurement, and fails if it arrives at another one. If it was never
measured, no verdict is expected. `null` has the metrics of a world where every part of the claim is false, such as
equal methods or irrelevant signs. A test checks that they fail the thresholds, so that no threshold is vacuous.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

from fedsign.errors import DataError
from simulations.recipes.where import AT_HOME, BudgetOf, Where, in_options

Metrics = Mapping[str, float]


Shown = tuple[Metrics, Path]
"""Metrics, and a page or a figure of them."""

Measure = Callable[..., Metrics | Shown]
"""Takes `quick`; for a recipe with a choice of data and model also `where`."""


class Verdict(StrEnum):
    """The verdict on a claim. A quick check only detects that something is broken."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    DEPENDS = "depends on an open constant"
    DOES_NOT_HOLD = "does not hold"
    NOT_DECIDABLE = "not decidable here"
    PASSED = "quick check passed"
    FAILED = "quick check failed"


class NotDecidableHere(Exception):
    """Raised by a recipe when this machine lacks something, which the message names."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A condition on one metric: from `low` to `high`, worded by `condition`; `strict` excludes the ends."""

    metric: str
    condition: str
    low: float = -inf
    high: float = inf
    strict: bool = False

    def is_met(self, metrics: Metrics) -> bool:
        """Whether the metric satisfies the condition; NaN and missing metrics never do."""
        value = metrics.get(self.metric, float("nan"))
        return self.low < value < self.high if self.strict else self.low <= value <= self.high


def at_least(value: float, *metrics: str) -> list[Threshold]:
    """metric >= value, for each of some metrics."""
    return [Threshold(metric, f"at least {value:g}", low=value) for metric in metrics]


def at_most(value: float, *metrics: str) -> list[Threshold]:
    """metric <= value."""
    return [Threshold(metric, f"at most {value:g}", high=value) for metric in metrics]


def above(value: float, *metrics: str) -> list[Threshold]:
    """metric > value: unlike `at_least(0)`, a difference above 0 rejects equal methods."""
    return [Threshold(metric, f"above {value:g}", low=value, strict=True) for metric in metrics]


def below(value: float, *metrics: str) -> list[Threshold]:
    """metric < value."""
    return [Threshold(metric, f"below {value:g}", high=value, strict=True) for metric in metrics]


def within(value: float, tolerance: float, *metrics: str) -> list[Threshold]:
    """|metric - value| <= tolerance."""
    low, high = value - tolerance, value + tolerance
    return [Threshold(metric, f"{value:g} ± {tolerance:g}", low, high) for metric in metrics]


@dataclass(frozen=True, slots=True)
class Part:
    """One statement of a claim, with the thresholds that decide it."""

    says: str
    thresholds: Sequence[Threshold]

    def holds(self, metrics: Metrics) -> bool:
        """Whether all thresholds are met."""
        return all(threshold.is_met(metrics) for threshold in self.thresholds)


def part(says: str, *thresholds: Sequence[Threshold]) -> Part:
    """Make a part of a claim."""
    return Part(says, tuple(chain(*thresholds)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A claim and how to check it.

    Args:
        source: who makes the claim, and where: "FedSign, Figure 4"; empty for a claim of this project.
        given: preconditions for interpreting the metrics, such as that every run finished.
        quick_thresholds: thresholds of a check with fewer seeds, which detects defects; by default the claim's own.
        null: metrics of a world where every part of the claim is false.
        expected: the verdict of the last full measurement; None if there was none.
        data: the data sets the recipe was made for, the default first, with the expected verdict on each; empty if it
            was made for `home` only.
        home: the data set of `expected`, for a recipe that can be checked on others.
        budget: the trainings of the recipe, if it can be checked on any data; otherwise None.
        takes_model: whether the model can be chosen, where the data can.
        takes_other_data: whether `data` are examples. If not, published numbers on them make other data meaningless.
        where: the chosen data and model.
        open_constant: a constant that the paper leaves open; each part is about one of its values.
    """

    name: str
    claim: str
    measure: Measure
    parts: Sequence[Part]
    source: str = ""
    given: Sequence[Threshold] = ()
    quick_thresholds: Sequence[Threshold] = ()
    null: Metrics = field(default_factory=dict)
    expected: Verdict | None = None
    data: Mapping[str, Verdict | None] = field(default_factory=dict)
    home: str = "digits"
    budget: BudgetOf | None = None
    takes_model: bool = True
    takes_other_data: bool = True
    where: Where = AT_HOME
    open_constant: str = ""

    @property
    def thresholds(self) -> list[Threshold]:
        """The thresholds of all parts."""
        return [threshold for each in self.parts for threshold in each.thresholds]

    def check(self, *, quick: bool = False) -> "Finding":
        """Measure and judge."""
        try:
            measured = self.measure(quick)
        except NotDecidableHere as lacking:
            return Finding(recipe=self, quick=quick, reason=str(lacking))
        # data that are not on this machine: not a failed claim
        except DataError as error:
            return Finding(recipe=self, quick=quick, reason=in_options(error))
        metrics, page = measured if isinstance(measured, tuple) else (measured, None)
        return Finding(recipe=self, quick=quick, metrics=metrics, page=page)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A recipe's metrics, judged by its thresholds, or the `reason` why they could not be measured."""

    recipe: Recipe
    quick: bool
    metrics: Metrics = field(default_factory=dict)
    page: Path | None = None  # or a figure
    reason: str = ""

    @property
    def thresholds(self) -> Sequence[Threshold]:
        """The thresholds that count: the preconditions, and those of the claim or of the quick check."""
        # preconditions count in both: without them neither verdict means anything
        own = self.recipe.quick_thresholds if self.quick else ()
        return [*self.recipe.given, *(own or self.recipe.thresholds)]

    @property
    def verdict(self) -> Verdict:
        """The verdict according to the thresholds."""
        if self.reason:
            return Verdict.NOT_DECIDABLE
        if self.quick:
            met = all(threshold.is_met(self.metrics) for threshold in self.thresholds)
            return Verdict.PASSED if met else Verdict.FAILED
        if not all(threshold.is_met(self.metrics) for threshold in self.recipe.given):
            return Verdict.NOT_DECIDABLE
        holding = [each.holds(self.metrics) for each in self.recipe.parts]
        if all(holding):
            return Verdict.HOLDS
        if not any(holding):
            return Verdict.DOES_NOT_HOLD
        return Verdict.DEPENDS if self.recipe.open_constant else Verdict.IN_PART

    @property
    def expected(self) -> Verdict | None:
        """The recorded verdict; for a quick check, that it passes."""
        return Verdict.PASSED if self.quick else self.recipe.expected

    @property
    def as_expected(self) -> bool:
        """Whether the verdict is the recorded one; without a record, whether there is a verdict at all."""
        if self.expected is None:
            return self.verdict is not Verdict.NOT_DECIDABLE
        return self.verdict is self.expected

    def rows(self) -> list[dict[str, str]]:
        """A table with a row per threshold."""
        rows = []
        for name, measured in self.metrics.items():
            conditions = [each for each in self.thresholds if each.metric == name]
            verdicts = [(each.condition, "yes" if each.is_met(self.metrics) else "no") for each in conditions]
            for condition, met in verdicts or [("", "")]:
                rows.append({"metric": name, "measured": f"{measured:.4g}", "threshold": condition, "met": met})
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return everything for programs."""
        # a quick check has too few seeds to say which part holds
        judged = [] if self.quick or self.reason else self.recipe.parts
        return {
            "name": self.recipe.name,
            "source": self.recipe.source,
            "claim": self.recipe.claim,
            "quick": self.quick,
            "metrics": self.metrics,
            "thresholds": [
                {"metric": each.metric, "condition": each.condition, "met": each.is_met(self.metrics)}
                for each in self.thresholds
                if each.metric in self.metrics
            ],
            "parts": [{"says": each.says, "holds": each.holds(self.metrics)} for each in judged],
            "verdict": self.verdict,
            "expected": self.expected,
            "reason": self.reason,
            "page": None if self.page is None else str(self.page),
        }


def recipe(
    claim: str, *parts: Part, quick: Sequence[Sequence[Threshold]] = (), **options: Any
) -> Callable[..., Recipe]:
    """Make a function that measures a recipe; `valley_bn_init` is called `valley-bn-init`."""

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
