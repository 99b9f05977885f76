"""A local step: forward, penalty, backward, clipping, optimizer step; and the learning rates of a round's steps.

[Note: micro batches] With `client.micro_batch`, a batch is computed in pieces and their gradients are accumulated.
Each piece has its share of the batch's mean, over samples or whatever terms the task defines.  Memory is that of one
piece; the step equals that of the whole batch up to rounding.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from clients.local_optim import stepper
from clients.working_model import WorkingModel
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.optim.low_precision import Updates
from fedsign.records import LOST_UPDATES, Tensors
from fedsign.registry import resolve
from fedsign.tasks.base import num_terms
from fedsign.workload import Workload


class LocalStep:
    """Takes a client's local steps."""

    def __init__(
        self,
        workload: Workload,
        model: WorkingModel,
        objective: Objective,
        context: LocalContext,
        optimizer: torch.optim.Optimizer,
        updates: Updates | None = None,
    ) -> None:
        """`updates` are those of parameters below float32."""
        client = workload.config.client
        self._task, self._clip_norm, self._micro_batch = workload.training_task, client.clip_norm, client.micro_batch
        self._labels = workload.labels if client.loss == "model" else None
        self._model, self._optimizer = model, stepper(optimizer, model.low, updates)
        self._sees_masters = updates is not None and objective.has_penalty
        if updates is not None and self._micro_batch:
            for parameter in model.low:
                parameter.grad_dtype = torch.float32  # small gradients would vanish in a sum of many
        self._objective, self._context, self._has_gradient = objective, context, objective.has_gradient

    def scale(self, factor: float) -> None:
        """Multiply the optimizer's initial learning rates by a factor, from the next step on."""
        self._optimizer.scale(factor)

    def lost_updates(self) -> dict[str, float]:
        """The share of updates of weights below float32 that the first step has lost, if it was measured."""
        lost = self._optimizer.lost
        return {} if lost is None else {LOST_UPDATES: lost}

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        """Take a step; return the batch's task loss without penalties."""
        self._optimizer.clear()
        if self._micro_batch and len(targets) > self._micro_batch:
            task_loss = self._in_pieces(features, targets)
        else:
            task_loss, contrast = self._losses(features, targets)
            self._backward(task_loss if contrast is None else task_loss + contrast)
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self._model.parameters.values(), self._clip_norm)
        self._optimizer.step()
        return task_loss.detach()

    def _in_pieces(self, features: Tensor, targets: Tensor) -> Tensor:
        """Accumulate the gradients of the whole batch; see [Note: micro batches]."""
        self._backward(None)  # the penalty once per step, not once per piece
        total = max(num_terms(self._task, targets), 1)  # a batch of text may hold padding only
        loss_sum = torch.zeros((), device=targets.device)
        pieces = zip(features.split(self._micro_batch), targets.split(self._micro_batch), strict=True)
        for part, part_targets in pieces:
            share = num_terms(self._task, part_targets) / total
            task_loss, contrast = self._losses(part, part_targets)
            loss = task_loss * share
            if contrast is not None:
                loss = loss + contrast * (len(part) / len(features))  # always a mean over samples, unlike the task loss
            loss.backward()
            loss_sum = loss_sum + task_loss.detach() * share  # in the dtype of the loss
        return loss_sum

    def _backward(self, loss: Tensor | None) -> None:
        """Backpropagate a loss and the penalty together, so that parameter hooks, such as masks, see their sum."""
        parameters = self._model.in_training
        values = self._model.values() if self._sees_masters else parameters
        losses, pulls = [] if loss is None else [loss], Tensors()
        if self._has_gradient:
            with torch.no_grad():
                pulls = self._objective.penalty_gradient(values, self._context) or pulls
        elif (penalty := self._objective.penalty(values, self._context)) is not None:
            losses = [penalty if loss is None else loss + penalty]
        pulled = [name for name in pulls if parameters[name].requires_grad]  # frozen parameters are no roots
        if pulled:  # the core of torch.autograd.backward, which would import sympy first, just to compare shapes
            # a parameter as root: backward adds its entry in `pulls` to .grad through its hooks, in the same pass
            roots = (*losses, *(parameters[name] for name in pulled))
            gradients = (*(torch.ones_like(each) for each in losses), *(pulls[name] for name in pulled))
            _engine_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
        elif losses:
            losses[0].backward()

    def _losses(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The task loss, and the objective's contrast for the batch, if any."""
        labels = {} if self._labels is None else self._labels(targets)
        if not self._objective.contrasts:
            return self._task.loss(self._model.outputs(features, **labels), targets), None
        outputs, present = self._model.outputs_and_features(features, **labels)
        z = Representation(present=present, of=lambda others: self._model.features_of(others, features))
        return self._task.loss(outputs, targets), self._objective.contrast(z, self._context)


def factors(workload: Workload, *, round: int, num_steps: int) -> Iterator[float] | None:
    """The schedule's factor in each local step of a round; None if it is constant within a round.

    Step counting assumes that the client took part in every round, so the schedule needs no client state: step s of
    round t is number (t - 1) num_steps + s of rounds x num_steps.
    """
    config = workload.config
    part = config.client.schedule
    if part.per == "round":
        return None
    factor = partial(resolve("schedule", part.name), **part.settings)
    first = (round - 1) * num_steps + 1
    return (factor(step, config.rounds * num_steps) for step in range(first, first + num_steps))
