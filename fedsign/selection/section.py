"""Keys for model selection in the configuration table [results]."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fedsign.plugins import shown
from fedsign.rules import Rule
from fedsign.sections import NonNegative, Table


def _without_validation(config: Any) -> str:
    """results.keep_best or results.patience without validation samples"""
    given = {key: getattr(config.results, key) for key in ("keep_best", "patience")}
    used = [f"results.{key}={shown(value)}" for key, value in given.items() if value not in (False, 0)]
    return "" if config.data.validation_fraction else " and ".join(used)


def _known_metrics(config: Any) -> str:
    """results.keep_best names no metric of the run"""
    known = [*(name.rpartition(":")[2] for name in config.metrics), "loss"]
    chosen = config.results.keep_best
    return ", ".join(known) if isinstance(chosen, str) and chosen not in known else ""


class SelectionKeys(Table):
    """Keys in [results]."""

    no_result: ClassVar = frozenset({"keep_best"})
    neutral: ClassVar[Mapping[str, Any]] = {"patience": 0}
    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule(
            _without_validation,
            "{found} was given, but with data.validation_fraction=0 there are no validation samples to choose by",
            "set data.validation_fraction=0.1",
        ),
        Rule(
            _known_metrics,
            "results.keep_best={results.keep_best} was given; expected true, for the first metric, or one of {found}",
            "add it to metrics, or name one of these",
        ),
    )

    keep_best: bool | str = False  # keep the best model by validation: true for the first metric, or a metric's name
    patience: NonNegative = 0  # stop after this many rounds without a better validation metric; 0: never
