"""The clients of a round trained together: stacked parameters [K, ...], a local step of all of them at once.

Gives what `clients.trainer.SequentialTrainer` gives, to rounding: the same batches in the same order, the same
objective, optimiser, clipping, states and replies.  What it cannot do exactly it does not do at all:
`clients.paths` says so before a run.

A client that cannot begin (its state is missing) is left out of the stack and is a failure.  A stack that
raises is trained again client by client, so that the one at fault is the only failure.  A client that
diverges fills its own slice with NaN and nobody else's.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from clients.stacked_loss import StackedContext, StackedLoss, stacked_layers
from clients.stacked_optim import StackedOptimizer, clip_each, stacked_optimizer
from clients.stacked_plan import ClientPlan, StackedPlan, client_plan, stacked_plan
from clients.state import ClientStore
from clients.trainer import load_state, make_optimizer, to_device
from fedsign import plugins
from fedsign.data.base import Samples
from fedsign.errors import ConfigError, DiskFullError
from fedsign.objectives.base import LocalContext, Objective
from fedsign.optim.displacement import unit_displacement
from fedsign.records import Failure, ReplyStack, Tensors, TrainRequest, failure_of, roles_of
from fedsign.seeding import Purpose, generator
from fedsign.tasks.base import SampleTask
from fedsign.workload import Workload

T = TypeVar("T")

# K = clients of a stack, S = steps of the client that takes most, B = samples of the largest batch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Client:
    """A client that is ready to train."""

    request: TrainRequest
    context: LocalContext
    plan: ClientPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """A client that has trained."""

    client: _Client
    parameters: Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """Clients that have trained together: their tensors [K, ...] in the order of `clients`, by name.

    `theta` are the parameters, `buffers` what else the model holds; `train_losses` are means over the last epochs.
    """

    clients: Sequence[_Client]
    theta: Tensors
    buffers: Tensors
    train_losses: Sequence[float]

    def each(self) -> list[_Trained]:
        """The clients one by one."""
        return [
            _Trained(client=client, parameters={name: tensor[place] for name, tensor in self.theta.items()})
            for place, client in enumerate(self.clients)
        ]


class CohortTrainer:
    """Trains `chunk` clients at a time; the results do not depend on `chunk` beyond rounding."""

    def __init__(self, workload: Workload, *, chunk: int) -> None:
        self._workload, self._chunk = workload, chunk
        self._model = workload.make_model().train()
        self._roles = roles_of(self._model)
        self._layers = stacked_layers(self._model)
        self._train_samples, self._task = trainable(workload)

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[ReplyStack | Failure]:
        """The replies of a chunk as one stack, and its failures; requests that differ in what to do are not stacked."""
        for chunk in chunks_of(requests, self._chunk):
            yield from self._train_chunk(chunk, states)

    def _train_chunk(self, requests: Sequence[TrainRequest], states: ClientStore) -> Iterator[ReplyStack | Failure]:
        round = _Round(self._workload, self._model)
        begun = [_attempted(partial(round.begin, request, states), request) for request in requests]
        yield from (client for client in begun if isinstance(client, Failure))
        for trained in self._train([client for client in begun if isinstance(client, _Client)], round):
            if isinstance(trained, Failure):
                yield trained
            else:
                yield from self._replies(trained, round.objective, states)

    def _train(self, clients: Sequence[_Client], round: "_Round") -> "list[_Stack | Failure]":
        """All of them in one stack, or each in one of its own if that raises."""
        if not clients:
            return []
        try:
            return [self._train_stack(clients, round)]
        except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
            if len(clients) == 1:
                return [failure_of(clients[0].request.partition, error)]
            return [result for client in clients for result in self._train([client], round)]

    def _train_stack(self, clients: Sequence[_Client], round: "_Round") -> _Stack:
        partition = self._workload.partition
        plan = stacked_plan(
            [client.plan for client in clients], [partition[client.request.partition] for client in clients]
        )
        ordered = [clients[index] for index in plan.order]
        context = _stacked_context([client.context for client in ordered])
        theta = {
            name: (tensor if context.received_is_stacked else tensor.expand(len(clients), *tensor.shape)).clone()
            for name, tensor in context.received.items()
        }
        loss = StackedLoss(self._model, self._task, round.objective, self._layers)
        train_losses = self._minimise(theta, loss, round.make_optimizer(), plan, context)
        places = [plan.order.index(client) for client in range(len(clients))]
        return _Stack(
            clients=clients,
            theta={name: tensor[places] for name, tensor in theta.items()},
            buffers={},
            train_losses=[train_losses[place] for place in places],
        )

    def _minimise(
        self, theta: Tensors, loss: StackedLoss, optimizer: StackedOptimizer, plan: StackedPlan, context: StackedContext
    ) -> list[float]:
        """All local steps of all clients, in place; returns each one's mean task loss of its last epoch."""
        device, clip_norm = self._workload.device, self._workload.config.client.clip_norm
        dtype = next(iter(theta.values())).dtype
        chosen, weights = plan.samples.to(device), plan.weights.to(device, dtype)
        losses = torch.zeros(plan.loss_weights.shape, dtype=dtype, device=device)
        num = 0
        for step, active in enumerate(plan.active):
            if active != num:
                num = active
                moving = [tensor[:num] for tensor in theta.values()]
                free = [tensor.detach().requires_grad_() for tensor in moving]  # the same memory
                own = context.first(num)
            features, targets = self._train_samples.batch(chosen[step, :num])
            total, losses[step, :num] = loss(
                dict(zip(theta, free, strict=True)), features, targets, weights[step, :num], own
            )
            gradients = list(torch.autograd.grad(total, free))
            optimizer.step(moving, clip_each(gradients, clip_norm) if clip_norm else gradients)
        counted = plan.loss_weights.to(device, dtype)
        # Not a plain product: a loss of an earlier epoch may have been infinite, and 0 x inf is NaN.
        means: list[float] = torch.where(counted > 0, counted * losses, 0.0).sum(0).tolist()
        return means

    def _replies(self, stack: _Stack, objective: Objective, states: ClientStore) -> Iterator[ReplyStack | Failure]:
        """The clients' states are saved, then they answer as one."""
        partitions = [client.request.partition for client in stack.clients]
        tensors = {**stack.theta, **stack.buffers}
        replies = ReplyStack(
            round=stack.clients[0].request.round,
            partitions=partitions,
            tensors={name: tensors[name].cpu() for name in self._roles},
            roles=self._roles,
            num_examples=[len(self._workload.partition[partition]) for partition in partitions],
            metrics={"train-loss": stack.train_losses},
            has_state=objective.has_state,
        )
        if objective.has_state or type(objective).to_server is not Objective.to_server:
            kept = [_attempted(partial(_keep, one, objective, states), one.client.request) for one in stack.each()]
            failed = [place for place, extra in enumerate(kept) if isinstance(extra, Failure)]
            yield from (extra for extra in kept if isinstance(extra, Failure))
            replies = replies.without(failed) if failed else replies
            extras = [extra for extra in kept if not isinstance(extra, Failure)]
            replies = replace(replies, extra=_stack(extras) if extras else {})
        if len(replies):
            yield replies


class _Round:
    """What the clients of a chunk have in common, made by the first of them; each of them meets its errors."""

    def __init__(self, workload: Workload, model: torch.nn.Module) -> None:
        self._workload, self._model = workload, model
        self._optimizer: torch.optim.Optimizer | None = None
        self._received: tuple[Tensors, Tensors] = ({}, {})  # as it came, on the device
        self._displacements: dict[int, float | None] = {}
        self.objective = Objective()

    def begin(self, request: TrainRequest, states: ClientStore) -> _Client:
        """A client's plan and what its objective may read."""
        if self._optimizer is None:
            self.objective = plugins.build("objective", request.objective.name, request.objective.settings)
            self._optimizer = make_optimizer(self._workload, self._model, round=request.round)
        config, partition = self._workload.config, request.partition
        received = self._received_of(request)
        plan = client_plan(
            len(self._workload.partition[partition]),
            config.client.batch_size,
            generator(config.seed, Purpose.BATCHES, round=request.round, partition=partition),
            epochs=config.client.local_epochs,
            steps=config.client.local_steps,
        )
        context = LocalContext(
            received=received,
            state=load_state(self.objective, received, request, states),
            shared=to_device(request.shared, self._workload.device),
            unit_displacement=self._displacement(self._optimizer, len(plan.lengths)),
        )
        return _Client(request=request, context=context, plan=plan)

    def make_optimizer(self) -> StackedOptimizer:
        """A fresh one.

        Raises:
            ConfigError: its rule is not known for stacks.
        """
        found = None if self._optimizer is None else stacked_optimizer(self._optimizer)
        if found is None:
            raise ConfigError(
                f"client.optimizer.name={self._workload.config.client.optimizer.name} was given, but client.path=cohort knows "
                "the rules of torch's SGD, Adam and AdamW only; use client.path=sequential."
            )
        return found

    def _displacement(self, optimizer: torch.optim.Optimizer, num_steps: int) -> float | None:
        if num_steps not in self._displacements:
            self._displacements[num_steps] = unit_displacement(optimizer, num_steps)
        return self._displacements[num_steps]

    def _received_of(self, request: TrainRequest) -> Tensors:
        """The parameters on the device, in the model's types; the same tensors for requests that carry the same ones."""
        came, _ = self._received
        if came.keys() == request.tensors.keys() and all(request.tensors[name] is came[name] for name in came):
            return self._received[1]
        parameters = dict(self._model.named_parameters())
        if {name: tensor.shape for name, tensor in request.tensors.items()} != {
            name: parameter.shape for name, parameter in parameters.items()
        }:
            self._model.load_state_dict(request.tensors)  # says what does not fit, as on the sequential path
        received = {
            name: request.tensors[name].to(parameter.device, parameter.dtype) for name, parameter in parameters.items()
        }
        self._received = (request.tensors, received)
        return received


def trainable(workload: Workload) -> tuple[Samples, SampleTask]:
    """The training samples on their device, and the task, if both can be batched over clients.

    Raises:
        ConfigError: they cannot.
    """
    config, train, task = workload.config, workload.dataset.train, workload.training_task
    if not isinstance(train, Samples):
        raise ConfigError(
            f"data.name={config.data.name} was given, whose samples are fetched batch by batch, but client.path=cohort needs "
            "them in memory; use client.path=sequential."
        )
    if not isinstance(task, SampleTask):
        raise ConfigError(
            f"task={config.task} was given, which has no method `losses`, but client.path=cohort needs the loss of every "
            "sample; add losses(outputs, targets), whose mean is the loss, or use client.path=sequential."
        )
    return train.to(workload.device), task


def _attempted(work: Callable[[], T], request: TrainRequest) -> T | Failure:
    """What `work` gives, or the client's failure; a client's error is an answer, on every engine."""
    try:
        return work()
    except DiskFullError:
        raise  # not this client's fault: going on would lose one client after another
    except Exception as error:  # noqa: BLE001
        return failure_of(request.partition, error)


def _keep(trained: _Trained, objective: Objective, states: ClientStore) -> Tensors:
    """Save a client's state; what it sends besides its model."""
    request, context = trained.client.request, trained.client.context
    next_state = objective.next_state(trained.parameters, context) if objective.has_state else {}
    if objective.has_state:
        states.save(request.partition, request.round, next_state)
    return {name: tensor.cpu() for name, tensor in objective.to_server(next_state, context).items()}


def chunks_of(requests: Iterable[TrainRequest], size: int) -> Iterator[list[TrainRequest]]:
    """The requests that are trained as one stack, `size` at most."""
    for alike in _alike(requests):
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


def _alike(requests: Iterable[TrainRequest]) -> list[list[TrainRequest]]:
    """Groups of requests of one round and one objective, in the order of their first ones."""
    groups: dict[str, list[TrainRequest]] = {}
    for request in requests:
        spec = json.dumps([request.round, request.objective.name, dict(request.objective.settings)], sort_keys=True)
        groups.setdefault(spec, []).append(request)
    return list(groups.values())


def _stacked_context(contexts: Sequence[LocalContext]) -> StackedContext:
    first = contexts[0]
    received_differs = any(context.received is not first.received for context in contexts)
    shared_differs = any(not _same(context.shared, first.shared) for context in contexts)
    displacements = [context.unit_displacement for context in contexts]
    some = next(iter(first.received.values()))
    return StackedContext(
        received=_stack([context.received for context in contexts]) if received_differs else dict(first.received),
        received_is_stacked=received_differs,
        state=_stack([context.state for context in contexts]),
        shared=_stack([context.shared for context in contexts]) if shared_differs else dict(first.shared),
        shared_is_stacked=shared_differs,
        unit_displacement=None if first.unit_displacement is None else some.new_tensor(displacements),
    )


def _stack(trees: Sequence[Mapping[str, Tensor]]) -> Tensors:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
