"""The local steps of a stack of clients.

The gradient of a step is hand-written if the model is a small chain (`clients.cohort.chain`), otherwise autograd's.
The gradient of the penalty is added to it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from clients.cohort.chain import chain_gradient, chain_layers
from clients.cohort.context import CohortContext
from clients.cohort.loss import CohortLoss, penalty_gradient
from clients.cohort.modules import CohortModel, Draw, drawn_masks
from clients.cohort.optim import CohortOptimizer, clip_each
from clients.cohort.plan import CohortBatch, CohortPlan
from fedsign.data.base import IntArray, Samples
from fedsign.models.batch_norm import freeze_batch_norm
from fedsign.models.transform import packing_of
from fedsign.objectives.base import Objective
from fedsign.records import Tensors
from fedsign.seeding import lent
from fedsign.tasks.base import SampleTask
from fedsign.workload import Workload

_AT_ONCE = 8 * 2**20  # bytes of features

# K = clients in a stack, n = those that take part in a step, S = steps, B = samples of the largest batch


class CohortTraining:
    """Local training of stacks for one workload, prepared once for all rounds."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        # `clients.cohort.trial` refuses other classes
        self._samples = cast(Samples, workload.training_samples)
        self.task = cast(SampleTask, workload.training_task)
        self.workload = workload
        self.model = CohortModel(model)
        self.layers = chain_layers(model)
        self.chain = chain_gradient(self.layers, self.task, self._samples.shape)
        self.masks = packing_of(model).masks

    @property
    def needs_streams(self) -> bool:
        """Whether clients draw random numbers during training."""
        return self.model.draws or self.workload.config.data.augment != "none"

    def minimize(
        self,
        theta: Tensors,
        buffers: Tensors,
        objective: Objective,
        optimizer: CohortOptimizer,
        plan: CohortPlan,
        context: CohortContext,
        streams: Sequence[torch.Generator] = (),
        *,
        frozen_norms: bool = False,
    ) -> list[float]:
        """Take all steps, updating parameters and buffers [K, ...] in place; return the last epoch's mean task losses.

        `streams` are the clients' generators in the plan's order, if `needs_streams`.  With `frozen_norms` BatchNorm
        uses its running statistics; see [Note: batches of one] in clients.batches.
        """
        like = next(iter(theta.values()))
        weights = plan.weights.to(like)
        losses = torch.zeros_like(weights)  # [S, K, B]; read once at the end, since reading synchronizes a GPU
        step = _Step(self, objective, optimizer)
        if self.model.has_norm:
            self.model.module.train()
            if frozen_norms:
                freeze_batch_norm(self.model.module)
        with torch.no_grad():
            for number, (features, targets) in enumerate(self._batches(plan.samples.to(like.device))):
                num, batch, kept = plan.active[number], CohortBatch(features, targets, weights[number]), losses[number]
                step.take_part(num, theta, buffers, context)
                if num < len(kept):
                    batch, kept = batch.first(num), kept[:num]
                if streams:
                    lengths = plan.lengths[number, :num]
                    # before dropout, because the sequential path draws in this order
                    batch = batch._replace(features=self._augmented(batch.features, lengths, streams))
                    if self.model.draws:
                        if number == 0:  # a step's dropout calls, with their shapes per sample, never change
                            draws = step.draws(batch)
                        batch = batch._replace(masks=tuple(drawn_masks(draws, lengths, streams, batch.features)))
                kept.copy_(step(batch))
            counted = plan.loss_weights.to(like)
            # Not a plain product: a loss of an earlier epoch may be infinite, and 0 x inf is NaN.
            means: list[float] = torch.where(counted > 0, counted * (losses * weights).sum(2), 0.0).sum(0).tolist()
        return means

    def _augmented(self, features: Tensor, lengths: IntArray, streams: Sequence[torch.Generator]) -> Tensor:
        """Augment each client's true samples with its own generator, lent to torch's global one."""
        if self.workload.config.data.augment == "none":
            return features
        features = features.clone()
        for own, num, stream in zip(features, lengths.tolist(), streams, strict=False):
            with lent(stream):
                own[:num] = self.workload.augment(own[:num])
        return features

    def _batches(self, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Features and targets [K, B, ...] of each step, fetched for several steps at once within `_AT_ONCE`."""
        features, targets, shape = self._samples.features, self._samples.targets, self._samples.shape
        step_bytes = chosen[0].numel() * max(1, prod(shape)) * features.element_size()
        for part in chosen.split(max(1, _AT_ONCE // step_bytes)):
            index = part.flatten()
            yield from zip(
                features.index_select(0, index).view(*part.shape, *shape).unbind(),
                targets.index_select(0, index).view(*part.shape, *targets.shape[1:]).unbind(),
                strict=True,
            )


class _Step:
    """A local step of the clients that still take part."""

    def __init__(self, training: CohortTraining, objective: Objective, optimizer: CohortOptimizer) -> None:
        self._chain = None if objective.contrasts else training.chain  # a contrast reads the representation
        self._loss = CohortLoss(training.model, training.task, objective, training.layers)
        self._objective, self._optimizer = objective, optimizer
        self._clip_norm, self._masks = training.workload.config.client.clip_norm, training.masks
        self._reads_context = self._chain is None or objective.has_penalty
        self._num = 0
        self._theta: Tensors = {}
        self._buffers: Tensors = {}
        self._gradient: Tensors = {}
        self._context: CohortContext
        self._penalty: Callable[[], Tensors | None] | None = None

    def take_part(self, num: int, theta: Tensors, buffers: Tensors, context: CohortContext) -> None:
        """Restrict the following steps to the first `num` clients."""
        if num == self._num:
            return
        self._num = num
        self._theta = {name: tensor[:num] for name, tensor in theta.items()}  # views: steps update the stack in place
        self._buffers = {name: tensor[:num] for name, tensor in buffers.items()}
        if self._reads_context:
            self._context = context.first(num)
            self._penalty = penalty_gradient(self._objective, self._theta, self._context)
        self._gradient = {name: tensor[:num] for name, tensor in self._gradient.items()}

    def draws(self, batch: CohortBatch) -> list[Draw]:
        """The dropout calls of a step, found by a pass of the first client without side effects."""
        theta, buffers = (
            {name: tensor[:1].clone() for name, tensor in each.items()} for each in (self._theta, self._buffers)
        )
        return self._loss.draws(theta, batch.first(1), self._context.first(1), buffers=buffers)

    def __call__(self, batch: CohortBatch) -> Tensor:
        """Update the parameters; return the samples' task losses [n, B]."""
        descent = self._optimizer.descent
        pull = None if self._penalty is None else self._penalty()
        is_plain = pull is None and not self._clip_norm and not self._masks
        if self._chain is not None and is_plain and descent is not None:
            # theta <- theta - lr gradient, within the products that compute the gradient
            return self._chain.add(self._theta, batch, self._theta, beta=1, alpha=-descent)
        losses, gradient = self._gradient_of(pull, batch)
        # before clipping: elements without weights do not count in the norm
        gradients = [each * self._masks[name] if name in self._masks else each for name, each in gradient.items()]
        if self._clip_norm:
            gradients = clip_each(gradients, self._clip_norm)
        self._optimizer.step(list(self._theta.values()), gradients)
        return losses

    def _gradient_of(self, pull: Tensors | None, batch: CohortBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        if self._chain is not None:
            if pull is None and not self._gradient:  # reused from step to step
                # uninitialized: with beta = 0, the first product ignores it, NaN included
                self._gradient = {name: torch.empty_like(tensor) for name, tensor in self._theta.items()}
            into, beta = (self._gradient, 0) if pull is None else (pull, 1)
            return self._chain.add(self._theta, batch, into, beta=beta, alpha=1), into
        with torch.enable_grad():
            free = {name: tensor.detach().requires_grad_() for name, tensor in self._theta.items()}  # sharing memory
            total, losses = self._loss(free, batch, self._context, buffers=self._buffers)
        gradients = torch.autograd.grad(total, list(free.values()))
        if pull is not None:
            gradients = torch._foreach_add(gradients, list(pull.values()))
        return losses, dict(zip(free, gradients, strict=True))
