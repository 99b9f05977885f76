"""What an optimizer's factory says of itself besides its settings.

A factory takes (parameters, lr, weight_decay).  What else it declares: `fedsign.traits.OptimizerTraits`.  One that has to know layers or
names declares `takes_model` and takes the module in place of the parameters.  Where it `trains_part` of the model at a time, a client's
reply holds the tensors that it trained, and no others.  With `takes_groups` the one group of its optimizer may be divided into groups with
rates of their own.  `adapt_model` changes the model in every process that makes it, before anything is trained.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fedsign.models.transform import transforms_of
from fedsign.sections import OptimizerPart
from fedsign.traits import OptimizerTraits


@runtime_checkable
class PartTrainer(Protocol):
    """An optimizer that trains a part of the model at a time, and draws which."""

    # told the names of the parameters that train next, before they do
    before_training: Callable[[frozenset[str]], None] | None

    def begin(self, *, seed: int, client: int, round: int, first_step: int) -> None:
        """A client's round begins: its draws are those of these numbers; `first_step` is the first step of the round, counted over all rounds."""
        ...

    def end(self) -> None:
        """The round is over: whatever was frozen is as it was before."""
        ...

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that have been trained since `begin`."""
        ...


@runtime_checkable
class BlockTrainer(PartTrainer, Protocol):
    """One that draws among blocks of the model."""

    blocks: Mapping[str, nn.Module]  # by their names in the model


@contextmanager
def drawing(
    part: PartTrainer, take: Callable[[frozenset[str]], None], *, seed: int, client: int, round: int, num_steps: int
) -> Iterator[None]:
    """Inside the block an optimizer draws what a client trains in a round of so many steps, and `take` is told.

    Steps are counted as if the client took part in every round, so that its draws need no memory: the first one of round t
    is number (t - 1) num_steps.
    """
    part.before_training = take
    part.begin(seed=seed, client=client, round=round, first_step=(round - 1) * num_steps)
    try:
        yield
    finally:
        part.before_training = None
        part.end()


def subject(name: str, model: nn.Module) -> Any:
    """What the factory behind a name is given first: the module, or its parameters."""
    return model if OptimizerTraits.of(name).takes_model else model.parameters()


def optimizer_of(part: OptimizerPart, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """A fresh optimizer of a model's parameters; a transform of the model may make its own.

    Raises:
        ConfigError: it does not suit the model.
    """
    own = (transform.optimizer(part, model, lr, weight_decay) for transform in transforms_of(model))
    made = next((each for each in own if each is not None), None)
    optimizer: torch.optim.Optimizer = made or part.build(subject(part.name, model), lr, weight_decay)
    return optimizer
