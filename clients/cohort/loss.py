"""The losses of a cohort as one program: stacked parameters in, one loss per client out.

No client's loss depends on another's parameters, so the gradient of the summed losses contains each client's own
gradient in its slice, and plain autograd suffices.  Models of linear layers and elementwise functions become batched
matrix products; other models, and contrasts, are mapped over the clients by `torch.func.vmap`.  `clients.cohort.chain`
does the same by hand for small chains.

The gradient of penalties is added separately: the objective's own, for all clients at once, or autograd's; see
[Note: one gradient for three paths] in fedsign.objectives.base.

[Note: means over true samples] A batch may be padded with samples of weight 0.  Therefore losses are computed per
sample (`Task.losses`) and summed with weights.  The same holds for an objective's contrast, whose mean over the batch
(`Objective.contrast_is_mean`) is rebuilt from the contrasts of single samples.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from clients.cohort.chain import Layer
from clients.cohort.context import CohortContext
from clients.cohort.modules import CohortModel, Draw
from clients.cohort.plan import CohortBatch
from fedsign.models.features import forward_with_features
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.records import Tensors
from fedsign.tasks.base import SampleTask

# K = clients in the stack, B = samples in a batch


class CohortLoss:
    """The clients' losses on a batch: the task's, and the objective's contrast."""

    def __init__(
        self, model: CohortModel, task: SampleTask, objective: Objective, layers: list[Layer] | None = None
    ) -> None:
        """`layers` are the model's `chain_layers`, found once for many rounds."""
        self._model, self._task, self._objective, self._layers = model, task, objective, layers

    def __call__(
        self, theta: Tensors, batch: CohortBatch, context: CohortContext, *, buffers: Tensors | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sum of the clients' losses without penalties, and the detached task losses per sample [K, B].

        theta is [K, ...].  BatchNorm updates `buffers` [K, ...] in place.  The batch needs a mask for each of `draws`.
        """
        outputs, contrast = self._passed(theta, buffers or {}, batch, context)
        # a task knows one batch axis: K clients with B samples are one batch of K B
        losses = self._task.losses(outputs.flatten(0, 1), batch.targets.flatten(0, 1)).view_as(batch.weights)
        total = (losses * batch.weights).sum()
        if contrast is not None:
            total = total + contrast.sum()
        return total, losses.detach()

    def draws(self, theta: Tensors, batch: CohortBatch, context: CohortContext, *, buffers: Tensors) -> list[Draw]:
        """The calls of dropout layers in a step, in order; updates `buffers`."""
        noted = self._model.batch.draws = list[Draw]()
        self._passed(theta, buffers, batch, context)
        self._model.batch.draws = None
        return noted

    def _passed(
        self, theta: Tensors, buffers: Tensors, batch: CohortBatch, context: CohortContext
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

    def _outputs(self, theta: Tensors, buffers: Tensors, batch: CohortBatch) -> Tensor:
        """One client's outputs [B, outputs]."""
        self._model.batch.begin(batch.weights, batch.masks)
        outputs: Tensor = functional_call(self._model.module, {**theta, **buffers}, (batch.features,))
        return outputs

    def _contrasted(
        self, context: LocalContext, theta: Tensors, buffers: Tensors, batch: CohortBatch
    ) -> tuple[Tensor, Tensor]:
        """One client's outputs [B, outputs] and contrast; see [Note: means over true samples]."""
        module, features = self._model.module, batch.features
        self._model.batch.begin(batch.weights, batch.masks)
        # only this pass moves the running statistics; those in `of` compute representations under other parameters
        outputs, z = forward_with_features(module, {**theta, **buffers}, features, moves_buffers=True)

        def of_sample(present: Tensor, index: Tensor) -> Tensor:
            def of(others: Mapping[str, Tensor]) -> Tensor:
                """This sample's representation, from the whole batch, since BatchNorm mixes samples."""
                # the sample's row, [1, d]
                return forward_with_features(module, {**buffers, **others}, features)[1].index_select(0, index[None])

            term = self._objective.contrast(Representation(present=present[None], of=of), context)
            return z.new_zeros(()) if term is None else term

        indices = torch.arange(len(features), device=features.device)
        return outputs, (torch.vmap(of_sample)(z, indices) * batch.weights).sum()


def penalty_gradient(
    objective: Objective, theta: Tensors, context: CohortContext
) -> Callable[[], Tensors | None] | None:
    """A function that returns the gradient of the penalties at the current theta [K, ...], as new tensors or None.

    None instead of a function if the objective has no penalty.
    """
    if objective.has_gradient:
        return partial(_own, objective, theta, context.joint())
    return partial(by_autograd, objective, theta, context) if objective.has_penalty else None


def _own(objective: Objective, theta: Tensors, context: LocalContext) -> Tensors | None:
    gradients = objective.penalty_gradient(theta, context)
    if gradients is None:
        return None
    # A gradient that reads only shared tensors has no client axis yet.  The clone has memory of its own, because the
    # chain's gradient is added in place.
    return {
        name: gradients[name] if gradients[name].shape == tensor.shape else gradients[name].expand_as(tensor).clone()
        for name, tensor in theta.items()
    }


def by_autograd(objective: Objective, theta: Tensors, context: CohortContext) -> Tensors:
    """The gradient of the summed penalties, which has each client's own gradient in its slice."""

    def penalty(context: LocalContext, theta: Mapping[str, Tensor]) -> tuple[Tensor]:
        term = objective.penalty(theta, context)
        return (next(iter(theta.values())).new_zeros(()) if term is None else term,)

    with torch.enable_grad():
        free = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
        (terms,) = context.mapped(penalty, free)
        total = terms.sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    gradients = torch.autograd.grad(total, list(free.values()), materialize_grads=True)
    return {
        name: tensor.clone() for name, tensor in zip(free, gradients, strict=True)
    }  # autograd may return expanded ones
