"""A client's local training, one client after another: the readable path, and the specification.

`train_many` is the seam: whatever trains many clients at once has to give what this gives.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from clients.batches import num_steps, schedule
from clients.state import ClientStore
from fedsign import plugins
from fedsign.data.base import AnySamples
from fedsign.errors import ConfigError, DiskFullError
from fedsign.models.batch_norm import freeze_batch_norm, has_batch_norm
from fedsign.models.features import classifier_of, forward_with_features, recorded_features
from fedsign.objectives.base import LocalContext, Objective, Representation
from fedsign.optim.displacement import unit_displacement
from fedsign.records import (
    Failure,
    ObjectiveSpec,
    ReplyStack,
    Tensors,
    TrainReply,
    TrainRequest,
    failure_of,
    roles_of,
    tensors_of,
)
from fedsign.seeding import Purpose, generator, torch_stream
from fedsign.workload import Workload


class LocalTrainer(Protocol):
    """Anything that can train clients."""

    def train_many(
        self, requests: Iterable[TrainRequest], states: ClientStore
    ) -> Iterator[TrainReply | ReplyStack | Failure]:
        """One reply or failure per request, in any order; those of several clients may come as one stack."""
        ...


class SequentialTrainer:
    """One working model; every request trains it from the received tensors."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._model = workload.make_model()
        self._roles = roles_of(self._model)
        self._has_batch_norm = has_batch_norm(self._model)

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[TrainReply | Failure]:
        """Train one client after another; a client that raises is a failure, not the end."""
        for request in requests:
            try:
                yield self.train(request, states)
            except DiskFullError:
                raise  # not this client's fault: going on would lose one client after another
            except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
                yield failure_of(request.partition, error)

    def train(self, request: TrainRequest, states: ClientStore) -> TrainReply:
        """One client's round: load, minimise, save its state, reply."""
        model, config = self._model, self._workload.config
        model.load_state_dict(request.tensors)
        objective: Objective = plugins.build("objective", request.objective.name, request.objective.settings)
        samples = self._workload.samples_of(request.partition)
        optimizer = make_optimizer(self._workload, model, round=request.round)
        steps = num_steps(
            len(samples),
            config.client.batch_size,
            epochs=config.client.local_epochs,
            steps=config.client.local_steps,
            join_last=self._has_batch_norm,
        )
        received = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        context = LocalContext(
            received=received,
            state=load_state(objective, received, request, states),
            shared=to_device(request.shared, self._workload.device),
            unit_displacement=unit_displacement(optimizer, steps),
        )
        train_loss = self._minimise(objective, context, optimizer, samples, request)
        trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
        next_state = objective.next_state(trained, context) if objective.has_state else {}
        if objective.has_state:
            states.save(request.partition, request.round, next_state)
        return TrainReply(
            round=request.round,
            partition=request.partition,
            tensors={name: tensor.cpu() for name, tensor in tensors_of(model).items()},
            roles=self._roles,
            num_examples=len(samples),
            metrics={"train-loss": train_loss},
            has_state=objective.has_state,
            extra={name: tensor.cpu() for name, tensor in objective.to_server(next_state, context).items()},
        )

    def _minimise(
        self,
        objective: Objective,
        context: LocalContext,
        optimizer: torch.optim.Optimizer,
        samples: AnySamples,
        request: TrainRequest,
    ) -> float:
        """All local steps; returns the mean task loss of the last epoch, per sample."""
        workload, settings = self._workload, self._workload.config.client
        seed, round, partition = workload.config.seed, request.round, request.partition
        rng = generator(seed, Purpose.BATCHES, round=round, partition=partition)
        stream = torch_stream(seed, Purpose.TRAINING, round=round, partition=partition, device=workload.device)
        plan = schedule(
            len(samples),
            settings.batch_size,
            rng,
            epochs=settings.local_epochs,
            steps=settings.local_steps,
            join_last=self._has_batch_norm,
        )
        self._model.train()
        if self._has_batch_norm and min(len(samples), settings.batch_size) == 1:
            freeze_batch_norm(self._model)  # [Note: batches of one] in clients.batches
        step = _Step(workload, self._model, objective, context, optimizer)
        samples = samples.to(workload.device)
        with stream:
            for epoch in plan:
                total, count = torch.zeros((), device=workload.device), 0
                for index in epoch:
                    features, targets = samples.batch(index)
                    total += len(index) * step(workload.augment(features), targets)
                    count += len(index)
        return total.item() / count


class _Step:
    """One local step: forward, penalties, backward, clipping, the optimiser's step."""

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        objective: Objective,
        context: LocalContext,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._workload, self._model, self._objective = workload, model, objective
        self._context, self._optimizer = context, optimizer
        self._parameters = dict(model.named_parameters())
        self._clip_norm = workload.config.client.clip_norm

    def __call__(self, features: Tensor, targets: Tensor) -> Tensor:
        """Returns the batch's task loss, without penalties."""
        self._optimizer.zero_grad(set_to_none=True)
        outputs, contrast = self._contrasted(features) if self._objective.contrasts else (self._model(features), None)
        task_loss = self._workload.training_task.loss(outputs, targets)
        loss = task_loss
        for term in (contrast, self._objective.penalty(self._parameters, self._context)):
            loss = loss if term is None else loss + term
        loss.backward()
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
        self._optimizer.step()
        return task_loss.detach()

    def _contrasted(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs and the objective's term for the batch's representation."""
        with recorded_features(self._model) as latest:
            outputs = self._model(features)
            z = Representation(present=latest(), of=lambda others: self._representation(others, features))
        return outputs, self._objective.contrast(z, self._context)

    def _representation(self, parameters: Mapping[str, Tensor], features: Tensor) -> Tensor:
        return forward_with_features(self._model, parameters, features)[1]


def load_state(objective: Objective, received: Tensors, request: TrainRequest, states: ClientStore) -> Tensors:
    """The state that a client starts from, where its parameters are; empty for an objective without one."""
    if not objective.has_state:
        return {}
    kept = states.load(request)
    if kept is None:
        return objective.initial_state(received)
    return to_device(kept, next(iter(received.values())).device)


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """The same tensors on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def make_optimizer(workload: Workload, model: nn.Module, *, round: int) -> torch.optim.Optimizer:
    """A fresh optimiser of the model's parameters, with the learning rate of the round."""
    client = workload.config.client
    lr = client.lr * client.schedule.build(round, workload.config.rounds)
    optimizer: torch.optim.Optimizer = client.optimizer.build(model.parameters(), lr, client.weight_decay)
    return optimizer


def check_training(workload: Workload, spec: ObjectiveSpec) -> None:
    """Make a client's parts once, so that a mistake is one sentence before a run begins.

    Raises:
        ConfigError: a part cannot be made, or they do not suit each other.
    """
    model, client = workload.make_model(), workload.config.client
    objective: Objective = plugins.build("objective", spec.name, spec.settings)
    optimizer = make_optimizer(workload, model, round=1)
    if objective.needs_unit_displacement and unit_displacement(optimizer, 1) is None:
        raise ConfigError(
            f"client.optimizer.name={client.optimizer.name} was given, but objective '{spec.name}' needs an optimiser that "
            "does not rescale gradients; use client.optimizer.name=sgd."
        )
    if objective.contrasts and len(list(model.parameters())) == len(list(classifier_of(model).parameters())):
        raise ConfigError(
            f"model.name={workload.config.model.name} was given, but objective '{spec.name}' contrasts what enters the classifier, "
            "and here that is the data itself; use a model with a hidden layer."
        )
    workload.training_task  # noqa: B018 - made on first use
