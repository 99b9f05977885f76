"""The losses of many clients as one program: stacked parameters in, one loss per client out.

The sum of the clients' losses has each client's own gradient in its slice, since no client's loss depends on
another's parameters; so plain autograd serves.  Models of linear layers and elementwise functions are batched
matrix products; every other model and every contrast is mapped over the clients by `torch.func.vmap`.
`clients.cohort.chain` does the same by hand for small chains.

The gradient of penalties is added by itself: the objective's own, of all clients at once, or autograd's; see
[Note: one gradient for three paths] in fedsign.objectives.base.

[Note: means over true samples] A batch may be filled up with samples of weight 0.  The task's loss is therefore
asked for sample by sample (`Task.losses`) and summed with the weights; so is an objective's contrast, whose mean over
the batch (`Objective.contrast_is_mean`) is rebuilt from its samples' contrasts.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from clients.cohort.chain import Layer
from clients.cohort.context import StackedContext
from clients.cohort.modules import Draw, StackedModel
from clients.cohort.plan import StackedBatch
from fedsign.models.features import forward_with_features
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.records import Tensors
from fedsign.tasks.base import SampleTask

# K = clients of the stack, B = samples of a batch


class StackedLoss:
    """Each client's loss of a batch: the task's, and the objective's contrast."""

    def __init__(
        self, model: StackedModel, task: SampleTask, objective: Objective, layers: list[Layer] | None = None
    ) -> None:
        """`layers` are the model's `stacked_layers`, looked up once for many rounds."""
        self._model, self._task, self._objective, self._layers = model, task, objective, layers

    def __call__(
        self, theta: Tensors, batch: StackedBatch, context: StackedContext, *, buffers: Tensors | None = None
    ) -> tuple[Tensor, Tensor]:
        """The clients' losses without penalties, summed, and each sample's task loss [K, B], detached.

        theta [K, ...].  BatchNorm updates `buffers` [K, ...] in place.  The batch has as many masks as `draws` gives.
        """
        outputs, contrast = self._passed(theta, buffers or {}, batch, context)
        losses = self._task.losses(outputs.flatten(0, 1), batch.targets.flatten()).view_as(batch.weights)
        total = (losses * batch.weights).sum()
        if contrast is not None:
            total = total + contrast.sum()
        return total, losses.detach()

    def draws(self, theta: Tensors, batch: StackedBatch, context: StackedContext, *, buffers: Tensors) -> list[Draw]:
        """What dropout draws in such a step, call by call; moves `buffers`."""
        noted = self._model.batch.draws = list[Draw]()
        self._passed(theta, buffers, batch, context)
        self._model.batch.draws = None
        return noted

    def _passed(
        self, theta: Tensors, buffers: Tensors, batch: StackedBatch, context: StackedContext
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [K, B, outputs] and contrasts [K]."""
        if self._objective.contrasts:
            outputs, contrast = context.mapped(self._contrasted, theta, buffers, batch)
            return outputs, contrast
        if self._layers is None:
            outputs = torch.vmap(self._outputs)(theta, buffers, batch)
            return outputs, None
        x = batch.features
        for layer in self._layers:
            x = layer(theta, x)
        return x, None

    def _outputs(self, theta: Tensors, buffers: Tensors, batch: StackedBatch) -> Tensor:
        """One client's [B, outputs]."""
        self._model.batch.begin(batch.weights, batch.masks)
        outputs: Tensor = functional_call(self._model.module, {**theta, **buffers}, (batch.features,))
        return outputs

    def _contrasted(
        self, context: LocalContext, theta: Tensors, buffers: Tensors, batch: StackedBatch
    ) -> tuple[Tensor, Tensor]:
        """One client's outputs [B, outputs] and contrast; see [Note: means over true samples]."""
        module, features = self._model.module, batch.features
        self._model.batch.begin(batch.weights, batch.masks)
        outputs, z = forward_with_features(module, {**theta, **buffers}, features, moves_buffers=True)

        def of_sample(present: Tensor, place: Tensor) -> Tensor:
            def of(others: Mapping[str, Tensor]) -> Tensor:
                """The batch's, since samples may be normalized together; of it this sample's."""
                return forward_with_features(module, {**buffers, **others}, features)[1].index_select(0, place[None])

            term = self._objective.contrast(Representation(present=present[None], of=of), context)
            return z.new_zeros(()) if term is None else term

        places = torch.arange(len(features), device=features.device)
        return outputs, (torch.vmap(of_sample)(z, places) * batch.weights).sum()


def penalty_gradient(
    objective: Objective, theta: Tensors, context: StackedContext
) -> Callable[[], Tensors | None] | None:
    """Gives what the penalties add to the gradient where theta [K, ...] is now, as new tensors, or None for nothing.

    None itself if the objective has no penalty.
    """
    if objective.has_gradient:
        return partial(_own, objective, theta, context.joint())
    return partial(by_autograd, objective, theta, context) if objective.has_penalty else None


def _own(objective: Objective, theta: Tensors, context: LocalContext) -> Tensors | None:
    found = objective.penalty_gradient(theta, context)
    if found is None:
        return None
    # One that reads no more than what the clients share is the same for all of them.
    return {
        name: found[name] if found[name].shape == tensor.shape else found[name].expand_as(tensor).clone()
        for name, tensor in theta.items()
    }


def by_autograd(objective: Objective, theta: Tensors, context: StackedContext) -> Tensors:
    """The sum of the clients' penalties has each client's own gradient in its slice."""

    def penalty(context: LocalContext, theta: Mapping[str, Tensor]) -> tuple[Tensor]:
        term = objective.penalty(theta, context)
        return (next(iter(theta.values())).new_zeros(()) if term is None else term,)

    with torch.enable_grad():
        free = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
        (terms,) = context.mapped(penalty, free)
        total = terms.sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    found = torch.autograd.grad(total, list(free.values()), materialize_grads=True)
    return {name: tensor.clone() for name, tensor in zip(free, found, strict=True)}  # may be expanded
