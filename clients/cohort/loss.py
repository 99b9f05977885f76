"""The losses of many clients as one program: stacked parameters in, one loss per client out.

The sum of the clients' losses has each client's own gradient in its slice, since no client's loss depends on
another's parameters; so plain autograd serves.  Models of linear layers and elementwise functions are batched
matrix products; every other model and every contrast is mapped over the clients by `torch.func.vmap`.  Penalties
are `clients.cohort.penalty`'s; `clients.cohort.chain` does the same by hand for small chains.

[Note: means over true samples] A batch may be filled up with samples of weight 0.  The task's loss is therefore
asked for sample by sample (`Task.losses`) and summed with the weights; so is an objective's contrast, whose mean over
the batch (`Objective.contrast_is_mean`) is rebuilt from its samples' contrasts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from clients.cohort.context import StackedContext
from clients.cohort.modules import Draw, StackedModel
from fedsign.models.features import forward_with_features
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.records import Tensors
from fedsign.tasks.base import SampleTask

# K = clients of the stack, B = samples of a batch

ELEMENTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity)
Layer = Callable[[Mapping[str, Tensor], Tensor], Tensor]


class StackedLoss:
    """Each client's loss of a batch: the task's, and the objective's contrast."""

    def __init__(
        self, model: StackedModel, task: SampleTask, objective: Objective, layers: "list[Layer] | None" = None
    ) -> None:
        """`layers` are the model's `stacked_layers`, looked up once for many rounds."""
        self._model, self._task, self._objective, self._layers = model, task, objective, layers

    def __call__(
        self,
        theta: Tensors,
        features: Tensor,
        targets: Tensor,
        weights: Tensor,
        context: StackedContext,
        *,
        buffers: Tensors | None = None,
        masks: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """The sum over the clients of what they minimise, penalties aside, and each sample's task loss [K, B], detached.

        theta [K, ...], features [K, B, ...], targets and weights [K, B].  `buffers` [K, ...] are moved in place by
        BatchNorm; `masks` [K, B, ...] are dropout's, as many as `draws` says.
        """
        outputs, contrast = self._passed(theta, features, weights, context, buffers or {}, masks)
        losses = self._task.losses(outputs.flatten(0, 1), targets.flatten()).view_as(weights)
        total = (losses * weights).sum()
        if contrast is not None:
            total = total + contrast.sum()
        return total, losses.detach()

    def draws(
        self, theta: Tensors, features: Tensor, weights: Tensor, context: StackedContext, *, buffers: Tensors
    ) -> list[Draw]:
        """What dropout draws in such a step, call by call; moves `buffers`."""
        self._passed(theta, features, weights, context, buffers, None)
        return self._model.batch.draws

    def _passed(
        self,
        theta: Tensors,
        features: Tensor,
        weights: Tensor,
        context: StackedContext,
        buffers: Tensors,
        masks: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [K, B, outputs] and contrasts [K]."""
        own = (theta, buffers, features, weights, tuple(masks or ()))
        if self._objective.contrasts:
            outputs, contrast = context.mapped(partial(self._contrasted, masks is None), *own)
            return outputs, contrast
        if self._layers is None:
            outputs = torch.vmap(partial(self._outputs, masks is None))(*own)
            return outputs, None
        for layer in self._layers:
            features = layer(theta, features)
        return features, None

    def _outputs(
        self,
        draws: bool,
        theta: Tensors,
        buffers: Tensors,
        features: Tensor,
        weights: Tensor,
        masks: tuple[Tensor, ...],
    ) -> Tensor:
        """One client's [B, outputs]."""
        self._model.batch.begin(weights, None if draws else masks)
        outputs: Tensor = functional_call(self._model.module, {**theta, **buffers}, (features,))
        return outputs

    def _contrasted(
        self,
        draws: bool,
        context: LocalContext,
        theta: Tensors,
        buffers: Tensors,
        features: Tensor,
        weights: Tensor,
        masks: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """One client's outputs [B, outputs] and contrast; see [Note: means over true samples]."""
        module = self._model.module
        self._model.batch.begin(weights, None if draws else masks)
        outputs, z = forward_with_features(module, {**theta, **buffers}, features, moves_buffers=True)

        def of_sample(present: Tensor, place: Tensor) -> Tensor:
            def of(others: Mapping[str, Tensor]) -> Tensor:
                """The batch's, since samples may be normalised together; of it this sample's."""
                return forward_with_features(module, {**buffers, **others}, features)[1].index_select(0, place[None])

            term = self._objective.contrast(Representation(present=present[None], of=of), context)
            return next(iter(theta.values())).new_zeros(()) if term is None else term

        places = torch.arange(len(features), device=features.device)
        return outputs, (torch.vmap(of_sample)(z, places) * weights).sum()


def stacked_layers(model: nn.Module) -> list[Layer] | None:
    """The layers of a chain of linear ones and elementwise functions, over stacks; None for any other model."""
    layers: list[Layer] = []
    for name, module in model.named_modules(remove_duplicate=False):  # one ReLU may stand in many places
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        match module:
            case nn.Sequential() if type(module) is nn.Sequential:
                continue  # its children come next, in the order in which it calls them
            case nn.Linear() if type(module) is nn.Linear:
                layers.append(_linear(name, has_bias=module.bias is not None))
            case nn.Flatten() if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
                layers.append(lambda theta, features: features.flatten(2))
            case _ if type(module) in ELEMENTWISE:
                layers.append(lambda theta, features, function=module: function(features))  # type: ignore[misc]
            case _:
                return None
    return layers


def _linear(name: str, *, has_bias: bool) -> Layer:
    prefix = f"{name}." if name else ""

    def layer(theta: Mapping[str, Tensor], features: Tensor) -> Tensor:
        weight = theta[f"{prefix}weight"].transpose(1, 2)
        bias = theta[f"{prefix}bias"].unsqueeze(1) if has_bias else weight.new_zeros(())
        outputs: Tensor = torch.baddbmm(bias, features.flatten(1, -2), weight)
        return outputs if features.dim() == 3 else outputs.unflatten(1, features.shape[1:-1])

    return layer
