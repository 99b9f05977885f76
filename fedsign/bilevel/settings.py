"""The configuration of `fedsign condense`: a frozen tree of its own, with the conventions of `fedsign.config`.

The defaults are the setup of the paper (`fedsign.bilevel.condensation`) on digits, with a rate for small networks.
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
    """The images to condense: pixels in [0, 1], not normalized."""

    kind = "dataset"
    name: str = "digits"


class MethodPart(Part):
    """The hypergradient method."""

    kind = "hypergradient"
    name: str = "fg2u"


class NetworkSection(Section):
    """The network that trains on the synthetic images."""

    kind: Literal["conv", "mlp"] = "mlp"
    width: Positive = 128  # channels of a convolution
    num_blocks: Positive = 3
    hidden: tuple[Positive, ...] = (64,)  # of the MLP


class InnerSection(Section):
    """Training on the synthetic images."""

    depth: Positive = 100
    lr: PositiveReal = 0.1
    momentum: Fraction = 0.9
    weight_decay: NonNegativeReal = 1e-4  # factor on |theta|^2 (no 1/2)
    batch_size: NonNegative = 0  # 0: all synthetic images


class OuterSection(Section):
    """Optimization of the images."""

    steps: NonNegative = 300
    lr: PositiveReal = 0.02  # of Adam; decays linearly to 0
    batch_size: Positive = 512  # real images
    evaluate_every: Positive = 50
    evaluations: Positive = 5  # networks per evaluation


class PhaseSection(Section):
    """An optional first phase with another method; off with 0 steps."""

    steps: NonNegative = 0
    lr: PositiveReal = 0.02
    method: MethodPart = MethodPart(name="hessian_free")


class CondensationConfig(Section):
    """One condensation."""

    name: FileName = "condensed-digits"
    seed: Seed = 0
    images_per_class: Positive = 1
    image_size: NonNegative = 0  # side of the square in which smaller images are centered; 0: unchanged
    start: Literal["real", "mean", "noise"] = "real"
    soft_labels: bool = False
    label_confidence: Annotated[float, Field(gt=0, lt=1)] = 0.99  # initial soft label of the image's own class
    device: str = "cpu"
    data: ImagesPart = ImagesPart()
    network: NetworkSection = NetworkSection()
    inner: InnerSection = InnerSection()
    method: MethodPart = MethodPart()
    outer: OuterSection = OuterSection()
    first_phase: PhaseSection = PhaseSection()

    def to_toml(self) -> str:
        """The complete configuration as TOML; `from_dict` restores an equal tree."""
        return tomli_w.dumps(self.model_dump(mode="json"))

    @property
    def num_steps(self) -> int:
        """Steps of both phases."""
        return self.first_phase.steps + self.outer.steps


def from_dict(given: Mapping[str, Any]) -> CondensationConfig:
    """Validate a tree and fill in the defaults.

    >>> from_dict({"method": {"name": "trgu"}}).method.settings
    {'truncated_steps': 10}

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    return checked(CondensationConfig, given)


def load(path: Path | None = None, overrides: Iterable[str] = ()) -> CondensationConfig:
    """The default condensation, changed by a file and then by `key=value` overrides."""
    return from_dict(read_tree(CondensationConfig, path, overrides))
