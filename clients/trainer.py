"""Sequential local training, one client after another: the readable path, and the specification.

`LocalTrainer.train_many` is the common interface; other trainers must reproduce the results of this one.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from clients.batches import Batching
from clients.local_optim import LocalOptimizer
from clients.local_step import LocalStep, factors
from clients.state.store import ClientStore
from clients.working_model import working_model
from fedsign import plugins
from fedsign.compatibility import Experiment, check_experiment
from fedsign.data.base import IntArray
from fedsign.errors import DiskFullError, LateError
from fedsign.models.batch_norm import freeze_batch_norm, has_batch_norm
from fedsign.models.transform import prepare_training
from fedsign.numerics import widened
from fedsign.objectives.base import LocalContext, Objective
from fedsign.optim.base import optimizer_of
from fedsign.optim.displacement import unit_displacement
from fedsign.records import LATE, CohortReply, Failure, ObjectiveSpec, Tensors, TrainReply, TrainRequest, failure_of
from fedsign.seeding import Purpose, generator, globals_seeded, integer
from fedsign.tasks.base import CheckingTask
from fedsign.workload import Workload

Draws = tuple[np.random.Generator, int]
"""A client's random streams in a round: the generator of its batches, and the seed for torch."""

_AT_ONCE = 64  # streams created in a row, which is five times faster than between trainings


class LocalTrainer(Protocol):
    """The interface of all trainers."""

    def train_many(
        self, requests: Iterable[TrainRequest], states: ClientStore
    ) -> Iterator[TrainReply | CohortReply | Failure]:
        """Yield one reply or failure per request, in any order; replies may be combined into stacks."""
        ...


class SequentialTrainer:
    """Trains one working model for every request, starting from the received tensors."""

    def __init__(self, workload: Workload, *, copies: bool = True) -> None:
        """Without `copies`, a reply aliases the working model and is valid until the next request is trained."""
        self._workload, self._copies = workload, copies
        self._model = working_model(workload)
        client, module = workload.config.client, self._model.module
        self._batching = Batching.of(client, join_last=has_batch_norm(module))
        self._optimizer = LocalOptimizer(lambda lr: optimizer_of(client.optimizer, module, lr, client.weight_decay))
        self._learning_rate = learning_rate(workload)
        self._objective: tuple[ObjectiveSpec, Objective] | None = None

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[TrainReply | Failure]:
        """Train clients one by one; a client that raises becomes a failure."""
        requests = iter(requests)
        while chunk := list(islice(requests, _AT_ONCE)):
            for request, draws in zip(chunk, list(map(self._draws, chunk)), strict=True):
                try:
                    yield self.train(request, states, draws)
                except LateError:
                    yield Failure(partition=request.partition, reason=LATE)
                except DiskFullError:
                    raise  # not the client's fault; continuing would lose one client after another
                except Exception as error:  # noqa: BLE001 - a client's error is a reply, on every engine
                    yield failure_of(request.partition, error)

    def _draws(self, request: TrainRequest) -> Draws:
        seed, where = self._workload.config.seed, {"round": request.round, "partition": request.partition}
        return generator(seed, Purpose.BATCHES, **where), integer(seed, Purpose.TRAINING, **where)

    def train(self, request: TrainRequest, states: ClientStore, draws: Draws | None = None) -> TrainReply:
        """A client's round: load, train, save its state, reply; `draws` are its random streams, if created already."""
        draws = draws or self._draws(request)
        self._model.load(request.tensors)
        try:
            return self._trained(request, states, draws)
        finally:
            self._model.release()

    def _trained(self, request: TrainRequest, states: ClientStore, draws: Draws) -> TrainReply:
        workload, model = self._workload, self._model
        objective = self._objective_of(request.objective)
        index = workload.share_of(request.partition)
        optimizer = self._optimizer.fresh(self._learning_rate(request.round))
        steps = self._batching.num_steps(len(index))
        context = self._context(objective, request, states, unit_displacement(optimizer, steps))
        # with partial updates, the tensors of `local_context` move to the device on access, and those of `context` stay
        # where they arrived; otherwise both are the same
        with model.in_round(optimizer, context, request, seed=workload.config.seed, num_steps=steps) as local_context:
            updates = model.updates(request, seed=workload.config.seed) if model.low else None
            step = LocalStep(workload, model, objective, local_context, optimizer, updates)
            rates = factors(workload, round=request.round, num_steps=steps)
            train_loss = self._minimize(step, index, draws, rates)
        lost = step.lost_updates() if model.low else {}
        del step, optimizer  # they hold moments, too
        self._optimizer.release()
        # The state is saved before the reply is sent: a saved state without a reply is harmless, since the server then
        # asks for the previous version; a reply without its state could not be continued.
        tensors = model.copies() if self._copies else model.tensors()
        next_state: Tensors = {}
        if objective.has_state:
            next_state = objective.next_state(model.after(context, tensors), context)
            states.save(request.partition, request.round, model.packing.packed(next_state))
        sent = objective.to_server(next_state, context)
        return TrainReply(
            round=request.round,
            partition=request.partition,
            tensors=tensors,
            roles=model.roles,
            num_examples=len(index),
            metrics={"train-loss": train_loss, **lost},
            has_state=objective.has_state,
            extra=to_device(model.packing.packed(sent), torch.device("cpu")) if sent else {},
        )

    def _context(
        self, objective: Objective, request: TrainRequest, states: ClientStore, unit_displacement: float | None
    ) -> LocalContext:
        """What the objective may read in this round, on the device of the received parameters."""
        received, device = self._model.received(request.tensors, round=request.round), self._model.home
        return LocalContext(
            received=received,
            state=self._model.whole(load_state(objective, received, request, states, device)),
            shared=self._model.whole(to_device(request.shared, device)),
            unit_displacement=unit_displacement,
            sizes=self._model.sizes,
        )

    def _objective_of(self, spec: ObjectiveSpec) -> Objective:
        """Build an objective, cached across clients, since objectives are pure functions."""
        if self._objective is None or self._objective[0] != spec:
            self._objective = spec, plugins.build("objective", spec.name, spec.settings)
        return self._objective[1]

    def _minimize(self, step: LocalStep, index: IntArray, draws: Draws, rates: Iterator[float] | None) -> float:
        """Take all local steps on the samples at `index`; return the last epoch's mean task loss per sample."""
        workload, (order, stream) = self._workload, draws
        samples, varies = workload.training_samples, workload.config.data.augment != "none"
        deadline = time.monotonic() + workload.config.server.round_timeout_s
        nums: list[int] = []
        losses: list[Tensor] = []
        freezes = self._batching.freezes_norms(len(index))
        if freezes:
            freeze_batch_norm(self._model.module)  # see [Note: batches of one] in clients.batches
        try:
            # dropout and augmentation draw from torch's global generators
            with globals_seeded(stream, device=workload.device), workload.numerics.repeatable():
                for epoch in self._batching.schedule(len(index), order):
                    nums.clear()  # the reported loss is that of the last epoch
                    losses.clear()
                    for chosen in epoch:
                        features, targets = samples.batch(torch.from_numpy(index[chosen.numpy()]))
                        if rates is not None:
                            step.scale(next(rates))
                        loss = step(workload.augment(features) if varies else features, targets)
                        nums.append(len(chosen))
                        losses.append(loss)
                        if time.monotonic() > deadline:  # `clients.watchdog` ends a client that hangs within a step
                            raise LateError(LATE)
        finally:
            if freezes:
                self._model.module.train()  # the next client uses the same module
        # losses stay on the device until here: reading each one would synchronize a GPU in every step
        means: list[float] = [losses[0].item()] if len(losses) == 1 else torch.stack(losses).tolist()
        return sum(num * mean for num, mean in zip(nums, means, strict=True)) / sum(nums)


def load_state(
    objective: Objective,
    received: Mapping[str, Tensor],
    request: TrainRequest,
    states: ClientStore,
    device: torch.device,
) -> Tensors:
    """The state that a client starts from, on a device; empty if the objective has none."""
    if not objective.has_state:
        return {}
    kept = states.load(request)
    if kept is not None:
        return to_device(kept, device)
    # a state adds up small differences, which bf16 would lose
    return {name: tensor.to(widened(tensor.dtype)) for name, tensor in objective.initial_state(received).items()}


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """Move tensors to a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def make_optimizer(workload: Workload, model: nn.Module, *, round: int) -> torch.optim.Optimizer:
    """A fresh optimizer with the round's learning rate, or with the full one if the schedule is per step."""
    client = workload.config.client
    return optimizer_of(client.optimizer, model, learning_rate(workload)(round), client.weight_decay)


def learning_rate(workload: Workload) -> Callable[[int], float]:
    """The learning rate as a function of the round; constant if the schedule is per step."""
    client, rounds = workload.config.client, workload.config.rounds
    if client.schedule.per == "step":
        return lambda round: client.lr
    factor = plugins.bound("schedule", client.schedule.name, client.schedule.settings)
    return lambda round: client.lr * factor(round, rounds)


def check_training(workload: Workload, spec: ObjectiveSpec, strategy: object = None) -> None:
    """Build a client's components once, so that mistakes surface before a run begins.

    Raises:
        ConfigError: a component cannot be built, or the components do not fit together.
    """
    experiment, config = Experiment(workload=workload, spec=spec, strategy=strategy), workload.config
    if isinstance(workload.task, CheckingTask):
        data, name = workload.dataset, config.model.name
        workload.task.check_model(
            experiment.model, data.input_shape, data.num_outputs, name=name, device=workload.device
        )
    check_experiment(experiment)
    _ = learning_rate(workload)(1), experiment.optimizer, workload.training_task
    workload.numerics.check_compiler()
    prepare_training(experiment.model)
