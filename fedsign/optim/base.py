"""The contract of optimizer factories, and of optimizers that train a part of the model at a time.

A factory takes (parameters, lr, weight_decay) and its settings, and may declare `fedsign.traits.OptimizerTraits`:

    takes_model    it takes the module instead of the parameters, to see layers or names
    trains_part    it trains a part of the model at a time; replies hold only the tensors that were trained
    takes_groups   its single parameter group may be split into groups with their own learning rates
    adapt_model    a function that changes the model in every process that builds it, before training
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fedsign.models.transform import transforms_of
from fedsign.sections import OptimizerPart
from fedsign.traits import OptimizerTraits


@runtime_checkable
class PartTrainer(Protocol):
    """An optimizer that trains a randomly drawn part of the model at a time."""

    # called with the names of the parameters that train next, before they change
    before_training: Callable[[frozenset[str]], None] | None

    def begin(self, *, seed: int, client: int, round: int, first_step: int) -> None:
        """Start a client's round, which seeds its draws; `first_step` counts steps over all rounds."""
        ...

    def end(self) -> None:
        """End the round and unfreeze what was frozen."""
        ...

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters trained since `begin`."""
        ...


@runtime_checkable
class TensorOptimizer(Protocol):
    """An optimizer that updates some parameters as whole tensors, and all others element by element.

    Of whole tensors, its step updates those that have a gradient, each by itself.
    """

    element_rule: type[torch.optim.Optimizer]  # the same update of the others

    @property
    def whole_tensors(self) -> Collection[nn.Parameter]:
        """The parameters that are updated as whole tensors."""
        ...


@runtime_checkable
class BlockTrainer(PartTrainer, Protocol):
    """A part trainer that draws blocks of the model."""

    blocks: Mapping[str, nn.Module]  # by name in the model


@contextmanager
def drawing(
    part: PartTrainer, take: Callable[[frozenset[str]], None], *, seed: int, client: int, round: int, num_steps: int
) -> Iterator[None]:
    """Run a client's round of `num_steps` steps: the optimizer draws what trains, and reports each draw to `take`.

    Step counting assumes that the client took part in every round, so draws need no client state: round t starts at
    step (t - 1) num_steps.
    """
    part.before_training = take
    # after the callback is set: begin() makes the first draw, which `take` must see, too
    part.begin(seed=seed, client=client, round=round, first_step=(round - 1) * num_steps)
    try:
        yield
    finally:
        # before end(), which unfreezes everything: that is not a draw
        part.before_training = None
        part.end()


def optimized_by(name: str, model: nn.Module) -> Any:
    """The first argument of a factory: the module, or its parameters."""
    return model if OptimizerTraits.of(name).takes_model else model.parameters()


def optimizer_of(part: OptimizerPart, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Build an optimizer for a model; a transform of the model may supply its own.

    Raises:
        ConfigError: the optimizer does not fit the model.
    """
    own = (transform.optimizer(part, model, lr, weight_decay) for transform in transforms_of(model))
    made = next((each for each in own if each is not None), None)
    optimizer: torch.optim.Optimizer = made or part.build(optimized_by(part.name, model), lr, weight_decay)
    return optimizer
