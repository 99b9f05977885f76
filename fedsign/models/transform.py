"""Transforms: what a capability did to a model, kept with the model for everyone who uses it.

A capability changes every new model of an experiment at the extension point `model_transform`, a function `(config, model) ->
None` that is called before weights are loaded, and an optimizer's factory does by its `adapt_model`.  Either may attach a `Transform`, whose methods are called where models are placed on
their device, sent, trained and exported.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from fedsign.records import Tensors
from fedsign.sections import OptimizerPart

_ATTRIBUTE: Final = "_fedsign_transforms"


class Packing:
    """Converts a model's tensors to what is sent of them, and back, by the names of its state_dict; the default sends all.

    `masks` are True where a tensor has weights.  Gradients of the other elements are 0.
    """

    masks: Mapping[str, Tensor] = {}

    def shape(self, name: str, whole: torch.Size) -> torch.Size:
        """The shape in which a tensor of this shape is sent."""
        return whole

    def packed(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Whole tensors, or stacks [K, ...] of them, as they are sent."""
        return dict(tensors)

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inverse of `packed`."""
        return tensors

    def put(self, name: str, sent: Tensor, into: Tensor) -> None:
        """Unpack a tensor that was sent into memory of its whole shape."""
        into.copy_(sent)


class Transform:
    """A base class whose methods leave the model as it is."""

    def packing(self, model: nn.Module) -> Packing:
        """How the model's tensors are sent."""
        return Packing()

    def place(self, model: nn.Module, shared: dict[str, Tensor]) -> None:
        """Called when the model has its weights and lies on its device; `shared` is for tensors that all models of this process share."""

    def prepare_training(self, model: nn.Module) -> None:
        """Called before the model is trained."""

    def optimizer(
        self, part: OptimizerPart, model: nn.Module, lr: float, weight_decay: float
    ) -> torch.optim.Optimizer | None:
        """A fresh optimizer for the transformed model; None for the usual one."""
        return None

    def plain(self, model: nn.Module) -> nn.Module:
        """A model that computes the same without the transform; may reuse the given one."""
        return model


def attach(model: nn.Module, transform: Transform) -> None:
    """Keep a transform with its model, and with copies of it."""
    vars(model)[_ATTRIBUTE] = (*transforms_of(model), transform)


def transforms_of(model: nn.Module) -> tuple[Transform, ...]:
    """In the order in which they were attached."""
    found: tuple[Transform, ...] = vars(model).get(_ATTRIBUTE, ())
    return found


def packing_of(model: nn.Module) -> Packing:
    """How the model's tensors are sent."""
    packings = (transform.packing(model) for transform in transforms_of(model))
    return next((packing for packing in packings if packing.masks), Packing())


def prepare_training(model: nn.Module) -> None:
    """Let the transforms prepare a model for training."""
    for transform in transforms_of(model):
        transform.prepare_training(model)


def plain_model(model: nn.Module) -> nn.Module:
    """A model without transforms that computes the same; may reuse the given one."""
    for transform in reversed(transforms_of(model)):
        model = transform.plain(model)
    vars(model).pop(_ATTRIBUTE, None)
    return model
