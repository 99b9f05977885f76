"""What `fedsign condense` is told: a frozen tree of its own, with the rules of an experiment's (`fedsign.config`).

The defaults are the set-up of the paper's authors (`fedsign.bilevel.condensation`) on digits, with a rate for networks this small.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field

from fedsign.config import checked, read_tree
from fedsign.sections import (
    FileName,
    Fraction,
    NonNegative,
    NonNegativeReal,
    Part,
    Positive,
    PositiveReal,
    Section,
    Seed,
)


class ImagesPart(Part):
    """Which images are condensed; their pixels are fractions, and stay as they are."""

    kind = "dataset"
    name: str = "digits"


class MethodPart(Part):
    """How the hypergradient is found."""

    kind = "hypergradient"
    name: str = "fg2u"


class NetworkSection(Section):
    """What is trained on the synthetic images."""

    kind: Literal["conv", "mlp"] = "mlp"
    width: Positive = 128  # channels of a convolution
    num_blocks: Positive = 3
    hidden: tuple[Positive, ...] = (64,)  # of the MLP


class InnerSection(Section):
    """The training on them."""

    depth: Positive = 100
    lr: PositiveReal = 0.1
    momentum: Fraction = 0.9
    weight_decay: NonNegativeReal = 1e-4  # times |theta|^2, without a half
    batch_size: NonNegative = 0  # 0: as many as there are synthetic images


class OuterSection(Section):
    """How the images are moved."""

    steps: NonNegative = 300
    lr: PositiveReal = 0.02  # of Adam, down to 0 along a line
    batch_size: Positive = 512  # real images
    evaluate_every: Positive = 50
    evaluations: Positive = 5  # networks that judge the images


class PhaseSection(Section):
    """The first of two phases, by another method; none where it has no steps."""

    steps: NonNegative = 0
    lr: PositiveReal = 0.02
    method: MethodPart = MethodPart(name="hessian_free")


class CondensationConfig(Section):
    """One condensation."""

    name: FileName = "condensed-digits"
    seed: Seed = 0
    images_per_class: Positive = 1
    image_size: NonNegative = 0  # side of the square, in the middle of which smaller images are put; 0: as they are
    start: Literal["real", "mean", "noise"] = "real"
    soft_labels: bool = False
    label_confidence: Annotated[float, Field(gt=0, lt=1)] = 0.99  # that soft labels begin with
    device: str = "cpu"
    data: ImagesPart = ImagesPart()
    network: NetworkSection = NetworkSection()
    inner: InnerSection = InnerSection()
    method: MethodPart = MethodPart()
    outer: OuterSection = OuterSection()
    first_phase: PhaseSection = PhaseSection()

    def to_toml(self) -> str:
        """The complete configuration; `from_dict` of it gives an equal tree."""
        return tomli_w.dumps(self.model_dump(mode="json"))

    @property
    def num_steps(self) -> int:
        """Of both phases."""
        return self.first_phase.steps + self.outer.steps


def from_dict(given: Mapping[str, Any]) -> CondensationConfig:
    """Check and complete a tree.

    >>> from_dict({"method": {"name": "trgu"}}).method.settings
    {'truncated_steps': 10}

    Raises:
        ConfigError: an unknown key, or a value that cannot be.
    """
    return checked(CondensationConfig, given)


def load(path: Path | None = None, overrides: Iterable[str] = ()) -> CondensationConfig:
    """The default condensation, changed by a file and then by `key=value` overrides."""
    return from_dict(read_tree(CondensationConfig, path, overrides))
