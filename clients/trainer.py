"""A client's local training, one client after another: the readable path, and the specification.

`train_many` is the seam: whatever trains many clients at once has to give what this gives.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from clients.state import ClientStore
from fedsign import plugins
from fedsign.errors import DiskFullError
from fedsign.objectives.base import Objective
from fedsign.records import Failure, Tensors, TrainReply, TrainRequest, failure_of, roles_of, tensors_of
from fedsign.seeding import Purpose, generator, torch_stream
from fedsign.workload import Workload


class LocalTrainer(Protocol):
    """Anything that can train clients."""

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[TrainReply | Failure]:
        """One reply or failure per request, in any order."""
        ...


class SequentialTrainer:
    """One working model; every request trains it from the received tensors."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._model = workload.make_model()
        self._roles = roles_of(self._model)

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
        model = self._model
        model.load_state_dict(request.tensors)
        objective: Objective = plugins.build("objective", request.objective.name, request.objective.settings)
        received = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        state = self._load_state(objective, received, request, states)
        num_examples, train_loss = self._minimise(objective, received, state, request)
        if objective.has_state:
            trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
            states.save(
                request.partition,
                request.round,
                objective.next_state(trained, received=received, state=state),
            )
        return TrainReply(
            round=request.round,
            partition=request.partition,
            tensors={name: tensor.cpu() for name, tensor in tensors_of(model).items()},
            roles=self._roles,
            num_examples=num_examples,
            metrics={"train-loss": train_loss},
            has_state=objective.has_state,
        )

    def _load_state(
        self, objective: Objective, received: Tensors, request: TrainRequest, states: ClientStore
    ) -> Tensors:
        if not objective.has_state:
            return {}
        kept = states.load(request)
        if kept is None:
            return objective.initial_state(received)
        return {name: tensor.to(self._workload.device) for name, tensor in kept.items()}

    def _minimise(
        self, objective: Objective, received: Tensors, state: Tensors, request: TrainRequest
    ) -> tuple[int, float]:
        """All local epochs; returns the number of samples and the mean task loss of the last epoch."""
        workload, settings = self._workload, self._workload.config.client
        samples = workload.samples_of(request.partition)
        features, targets = (
            samples.features.to(workload.device),
            samples.targets.to(workload.device),
        )
        optimizer = settings.optimizer.build(self._model.parameters(), settings.lr, settings.weight_decay)
        seed = workload.config.seed
        rng = generator(seed, Purpose.BATCHES, round=request.round, partition=request.partition)
        stream = torch_stream(
            seed,
            Purpose.TRAINING,
            round=request.round,
            partition=request.partition,
            device=workload.device,
        )
        self._model.train()
        with stream:
            for _ in range(settings.local_epochs):
                total = features.new_zeros(())
                for index in batches(len(samples), settings.batch_size, rng):
                    loss = self._step(objective, received, state, optimizer, features[index], targets[index])
                    total += len(index) * loss
        return len(samples), total.item() / len(samples)

    def _step(
        self,
        objective: Objective,
        received: Tensors,
        state: Tensors,
        optimizer: torch.optim.Optimizer,
        features: Tensor,
        targets: Tensor,
    ) -> Tensor:
        """One local step; returns the batch's task loss."""
        optimizer.zero_grad(set_to_none=True)
        task_loss = self._workload.task.loss(self._model(features), targets)
        penalty = objective.penalty(_parameters(self._model), received=received, state=state)
        (task_loss if penalty is None else task_loss + penalty).backward()
        optimizer.step()
        return task_loss.detach()


def batches(num_samples: int, batch_size: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """The indices of one epoch: shuffled, cut into batches, the last one as short as it is.

    >>> [len(index) for index in batches(10, 4, np.random.default_rng(0))]
    [4, 4, 2]
    """
    return iter(torch.from_numpy(rng.permutation(num_samples)).split(batch_size))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())
