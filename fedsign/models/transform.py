"""Transforms: changes to a model that travel with it, so that all its users can take them into account.

Two hooks change the new models of an experiment: the extension point `model_transform`, a function `(config, model) ->
None` that runs before weights are loaded, and an optimizer factory's `adapt_model`.  Either may attach a `Transform`,
whose methods are called when the model is moved to its device, sent, trained, or exported.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from fedsign.records import Tensors, ties_of
from fedsign.sections import OptimizerPart

_ATTRIBUTE: Final = "_fedsign_transforms"


class Packing:
    """Converts the tensors of a model's state_dict to their sent form and back; by default they are sent whole.

    `masks` are True where a tensor has weights.  Gradients of the other elements are 0.
    """

    masks: Mapping[str, Tensor] = {}

    def shape(self, name: str, whole: torch.Size) -> torch.Size:
        """The sent shape of a tensor of shape `whole`."""
        return whole

    def packed(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Convert whole tensors, or stacks [K, ...] of them, to their sent form."""
        return dict(tensors)

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inverse of `packed`."""
        return tensors

    def put(self, name: str, sent: Tensor, into: Tensor) -> None:
        """Unpack a sent tensor into a tensor of its whole shape."""
        into.copy_(sent)


class Transform:
    """The base class; its methods do nothing."""

    def packing(self, model: nn.Module) -> Packing:
        """The form in which the model's tensors are sent."""
        return Packing()

    def place(self, model: nn.Module, shared: dict[str, Tensor]) -> None:
        """Called when the model has its weights and device; `shared` holds tensors shared within this process."""

    def frozen_weights(self, model: nn.Module) -> Collection[str]:
        """Names of buffers that hold weights which clients do not train."""
        return ()

    def prepare_training(self, model: nn.Module) -> None:
        """Called before training."""

    def optimizer(
        self, part: OptimizerPart, model: nn.Module, lr: float, weight_decay: float
    ) -> torch.optim.Optimizer | None:
        """An optimizer for the transformed model; None for the default one."""
        return None

    def save_adapters(self, network: nn.Module, base: str, folder: Path) -> int:
        """Write what this transform adds to a network of `transformers`, whose weights are in the folder `base`.

        Returns the number of parameters.

        Raises:
            ConfigError: it changes more than it adds.
        """
        return 0

    def plain(self, model: nn.Module) -> nn.Module:
        """An equivalent model without this transform; may modify the given one."""
        return model


def attach(model: nn.Module, transform: Transform) -> None:
    """Attach a transform to a model and its future copies."""
    # a new tuple: shallow copies made earlier share the old one
    vars(model)[_ATTRIBUTE] = (*transforms_of(model), transform)


def transforms_of(model: nn.Module) -> tuple[Transform, ...]:
    """A model's transforms, in the order in which they were attached."""
    transforms: tuple[Transform, ...] = vars(model).get(_ATTRIBUTE, ())
    return transforms


def packing_of(model: nn.Module) -> Packing:
    """The model's packing: the first one with masks, or the default."""
    packings = (transform.packing(model) for transform in transforms_of(model))
    return next((packing for packing in packings if packing.masks), Packing())


def sent_tensors(model: nn.Module) -> Tensors:
    """The tensors of a model as they are sent: in sent form, tied ones once."""
    ties = ties_of(model)
    return packing_of(model).packed({name: own for name, own in model.state_dict().items() if name not in ties})


def whole_state(model: nn.Module, sent: Mapping[str, Tensor]) -> Tensors:
    """The `state_dict` of a model that holds `sent`: whole tensors, tied ones under each name."""
    whole = packing_of(model).whole(sent)
    return {**whole, **{name: whole[first] for name, first in ties_of(model).items() if first in whole}}


def prepare_training(model: nn.Module) -> None:
    """Call `prepare_training` of all transforms."""
    for transform in transforms_of(model):
        transform.prepare_training(model)


def frozen_weights(model: nn.Module) -> list[str]:
    """Names of buffers that hold weights which clients do not train, by all transforms."""
    return [name for transform in transforms_of(model) for name in transform.frozen_weights(model)]


def plain_model(model: nn.Module) -> nn.Module:
    """An equivalent model without transforms; may modify the given one."""
    # each was attached to what the previous ones had made, so the last is undone first
    for transform in reversed(transforms_of(model)):
        model = transform.plain(model)
    vars(model).pop(_ATTRIBUTE, None)
    return model
