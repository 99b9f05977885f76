"""Metrics that ask the model instead of reading its outputs for the test samples.

A metric declares its arguments by the trait `inputs`.  An evaluation prepares them once for all metrics that declare
the same object.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum, nan
from typing import Any, Protocol

from torch import nn

from fedsign.config import ExperimentConfig
from fedsign.data.base import AnySamples, Dataset, Tokenizer
from fedsign.numerics import Numerics
from fedsign.traits import MetricTraits


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A model in evaluation mode, and the samples on which it is evaluated."""

    model: nn.Module
    samples: AnySamples
    text: Tokenizer | None
    config: ExperimentConfig
    numerics: Numerics


class MetricInputs(Protocol):
    """Prepares the two arguments of metrics, in place of outputs and targets."""

    def lacks(self, dataset: Dataset) -> tuple[str, str]:
        """What its test samples lack, as `no ...`, and what to use instead; empty if they can be evaluated."""
        ...

    def is_due(self, config: ExperimentConfig, round: int) -> bool:
        """Whether a round is evaluated."""
        ...

    def of(self, evaluated: Evaluated) -> tuple[Any, Any]:
        """The arguments."""
        ...


def mean(values: Sequence[float]) -> float:
    """The mean over examples; NaN if there are none."""
    return fsum(values) / len(values) if values else nan


def columns_due(config: ExperimentConfig, round: int) -> Iterator[str]:
    """The names of the metrics that a round's record holds."""
    for name in config.metrics:
        inputs: MetricInputs | None = MetricTraits.of(name).inputs
        if inputs is None or inputs.is_due(config, round):
            yield name.rpartition(":")[2]
