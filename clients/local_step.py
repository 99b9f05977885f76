"""One local step: forward, penalties, backward, clipping, the optimizer's step; and the learning rates of a round's steps.

[Note: micro batches] With `client.micro_batch` a batch is computed in pieces whose gradients are added up, each with the
share that it has in the batch's mean (of samples, or of what else the task says that its mean is over).  What is in
memory at once is a piece's; the step is the whole batch's, to rounding.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from clients.local_optim import stepper
from clients.working_model import WorkingModel
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.records import Tensors
from fedsign.registry import resolve
from fedsign.tasks.base import num_terms
from fedsign.workload import Workload


class LocalStep:
    """See the module."""

    def __init__(
        self,
        workload: Workload,
        model: WorkingModel,
        objective: Objective,
        context: LocalContext,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        client = workload.config.client
        self._task, self._clip_norm, self._micro_batch = workload.training_task, client.clip_norm, client.micro_batch
        self._model, self._optimizer = model, stepper(optimizer)
        self._objective, self._context, self._has_gradient = objective, context, objective.has_gradient

    def scale(self, factor: float) -> None:
        """The next steps' learning rates: so many times those that the optimizer was made with."""
        self._optimizer.scale(factor)

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        """Returns the batch's task loss, without penalties."""
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
        """The gradients of the whole batch; see [Note: micro batches]."""
        self._backward(None)
        total = max(num_terms(self._task, targets), 1)
        found = torch.zeros((), device=targets.device)
        pieces = zip(features.split(self._micro_batch), targets.split(self._micro_batch), strict=True)
        for some, their_targets in pieces:
            share = num_terms(self._task, their_targets) / total
            task_loss, contrast = self._losses(some, their_targets)
            loss = task_loss * share
            if contrast is not None:
                loss = loss + contrast * (len(some) / len(features))  # a mean over samples, whatever the task's is over
            loss.backward()
            found = found + task_loss.detach() * share  # in the loss's own type
        return found

    def _backward(self, loss: Tensor | None) -> None:
        """The gradients of a loss and the penalty.  A parameter's hook, such as a sparse one's mask, gets the sum of the two."""
        parameters = self._model.in_training
        losses, pulls = [] if loss is None else [loss], Tensors()
        if self._has_gradient:
            with torch.no_grad():
                pulls = self._objective.penalty_gradient(parameters, self._context) or pulls
        elif (penalty := self._objective.penalty(parameters, self._context)) is not None:
            losses = [penalty if loss is None else loss + penalty]
        pulled = [name for name in pulls if parameters[name].requires_grad]
        if pulled:  # what torch.autograd.backward ends in; before that it imports sympy, to compare shapes
            roots = (*losses, *(parameters[name] for name in pulled))
            gradients = (*(torch.ones_like(each) for each in losses), *(pulls[name] for name in pulled))
            _engine_run_backward(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
        elif losses:
            losses[0].backward()

    def _losses(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """The task's loss, and the objective's term for the batch, if it has one."""
        if not self._objective.contrasts:
            return self._task.loss(self._model.outputs(features), targets), None
        outputs, present = self._model.outputs_and_features(features)
        z = Representation(present=present, of=lambda others: self._model.features_of(others, features))
        return self._task.loss(outputs, targets), self._objective.contrast(z, self._context)


def factors(workload: Workload, *, round: int, num_steps: int) -> Iterator[float] | None:
    """What the learning rate is multiplied with in each local step of a round; None where that is the same for all.

    Steps are counted as if the client took part in every round, so that its schedule needs no memory: step s of round t is
    the (t - 1) num_steps + s of rounds x num_steps.
    """
    config = workload.config
    part = config.client.schedule
    if part.per == "round":
        return None
    factor = partial(resolve("schedule", part.name), **part.settings)
    first = (round - 1) * num_steps + 1
    return (factor(step, config.rounds * num_steps) for step in range(first, first + num_steps))
