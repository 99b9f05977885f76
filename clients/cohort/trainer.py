"""The clients of a round trained together: stacked parameters [K, ...], a local step of all of them at once.

Gives what `clients.trainer.SequentialTrainer` gives, to rounding: the same batches in the same order, the same
objective, optimiser, clipping, states and replies.  What it cannot do exactly it does not do at all:
`clients.cohort.trial` says so before a run.

A client that cannot begin (its state is missing) is left out of the stack and is a failure.  A stack that
raises is trained again client by client, so that the one at fault is the only failure.  A client that
diverges fills its own slice with NaN and nobody else's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from clients.batches import Batching
from clients.cohort.context import stacked_context, stacked_tensors
from clients.cohort.optim import StackedOptimizer, stacked_optimizer
from clients.cohort.plan import StackedPlan, stacked_plan
from clients.cohort.training import StackedTensors, StackedTraining
from clients.local_trainers import chunks_of
from clients.state.store import ClientStore
from clients.trainer import load_state, make_optimizer, to_device
from fedsign import plugins
from fedsign.errors import ConfigError, DiskFullError
from fedsign.models.batch_norm import has_batch_norm
from fedsign.models.transform import Packing, packing_of
from fedsign.objectives.base import LocalContext, Objective
from fedsign.optim.displacement import unit_displacement
from fedsign.records import Failure, ObjectiveSpec, ReplyStack, Tensors, TrainReply, TrainRequest, failure_of, roles_of
from fedsign.seeding import Purpose, generator, torch_generator
from fedsign.workload import Workload

T = TypeVar("T")

# K = clients of a stack, S = steps of the client that takes most, B = samples of the largest batch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Client:
    """A client that is ready to train."""

    request: TrainRequest
    context: LocalContext
    buffers: Tensors  # as they came
    frozen_norms: bool  # see [Note: batches of one] in clients.batches


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """Clients that have trained together: their tensors [K, ...] in the order of `clients`, by name.

    `theta` are the parameters, `buffers` what else the model holds; `train_losses` are means over the last epochs.
    """

    clients: Sequence[_Client]
    theta: Tensors
    buffers: Tensors
    train_losses: Sequence[float]

    def parameters_of(self, place: int) -> Tensors:
        """A client's."""
        return {name: tensor[place] for name, tensor in self.theta.items()}


class CohortTrainer:
    """Trains `chunk` clients at a time; the results do not depend on `chunk` beyond rounding."""

    def __init__(self, workload: Workload, *, chunk: int) -> None:
        self._workload, self._chunk = workload, chunk
        self._model = workload.make_model().train()
        self._roles, self._packing = roles_of(self._model), packing_of(self._model)
        self._round = _Round(workload, self._model, self._packing)
        self._training = StackedTraining(workload, self._model)

    def train_many(
        self, requests: Iterable[TrainRequest], states: ClientStore
    ) -> Iterator[TrainReply | ReplyStack | Failure]:
        """The replies of a chunk as one stack, and its failures; requests that differ in what to do are not stacked."""
        for chunk in chunks_of(requests, self._chunk):
            yield from self._train_chunk(chunk, states)

    def _train_chunk(
        self, requests: Sequence[TrainRequest], states: ClientStore
    ) -> Iterator[TrainReply | ReplyStack | Failure]:
        round = self._round
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
        frozen = [client.frozen_norms for client in clients]
        if len(set(frozen)) > 1:
            return _joined(
                [
                    self._train_stack(
                        [c for c, is_frozen in zip(clients, frozen, strict=True) if is_frozen == kind], round
                    )
                    for kind in (False, True)
                ],
                clients,
            )
        plan = round.plan(clients)
        ordered = [clients[index] for index in plan.order]
        context = stacked_context([client.context for client in ordered])
        tensors = StackedTensors(
            theta=_copies([client.context.received for client in ordered]),
            buffers=_copies([client.buffers for client in ordered]),
        )
        losses = self._training.minimise(
            tensors,
            round.objective,
            round.make_optimizer(),
            plan,
            context,
            round.streams(ordered) if self._training.needs_streams else (),
            frozen_norms=frozen[0],
        )
        trained = _Stack(clients=ordered, theta=tensors.theta, buffers=tensors.buffers, train_losses=losses)
        return trained if plan.order == sorted(plan.order) else _joined([trained], clients)

    def _replies(
        self, stack: _Stack, objective: Objective, states: ClientStore
    ) -> Iterator[TrainReply | ReplyStack | Failure]:
        """The clients' states are saved, then they answer as one."""
        partitions = [client.request.partition for client in stack.clients]
        tensors = self._packing.packed({**stack.theta, **stack.buffers})
        replies = ReplyStack(
            round=stack.clients[0].request.round,
            partitions=partitions,
            tensors={name: tensors[name].cpu() for name in self._roles},
            roles=self._roles,
            num_examples=[len(self._workload.partition[partition]) for partition in partitions],
            metrics={"train-loss": stack.train_losses},
            has_state=objective.has_state,
        )
        if objective.has_state or objective.replies_with_more:
            kept = [
                _attempted(
                    partial(_keep, client, stack.parameters_of(place), objective, states, self._packing), client.request
                )
                for place, client in enumerate(stack.clients)
            ]
            failed = [place for place, extra in enumerate(kept) if isinstance(extra, Failure)]
            yield from (extra for extra in kept if isinstance(extra, Failure))
            replies = replies.without(failed) if failed else replies
            extras = [extra for extra in kept if not isinstance(extra, Failure)]
            if not all(_shapes(extra) == _shapes(extras[0]) for extra in extras):  # whose are wrong, the server says
                yield from (replace(one, extra=extra) for one, extra in zip(replies.replies(), extras, strict=True))
                return
            replies = replace(replies, extra=stacked_tensors(extras) if extras else {})
        if len(replies):
            yield replies


class _Round:
    """What the clients of a round have in common, made when the first of them needs it; each of them meets its errors.

    It serves one round after another, and keeps what the next one has in common with it.
    """

    def __init__(self, workload: Workload, model: torch.nn.Module, packing: Packing) -> None:
        self._workload, self._model, self._packing = workload, model, packing
        self._partition = workload.partition
        self._batching = Batching.of(workload.config.client, join_last=has_batch_norm(model))
        self._sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._spec: ObjectiveSpec | None = None
        self._rate: tuple[int, float] = (0, 0.0)  # a round, and what its learning rate is multiplied with
        self._optimizer: torch.optim.Optimizer | None = None
        self._received: tuple[Tensors, Tensors] = ({}, {})  # as it came; its parameters on the device
        self._buffers: Tensors = {}
        self._shared: tuple[Tensors, Tensors] = ({}, {})
        self._displacements: dict[int, float | None] = {}
        self._contexts: dict[int, LocalContext] = {}
        self.objective = Objective()

    def begin(self, request: TrainRequest, states: ClientStore) -> _Client:
        """What a client's objective may read."""
        self._make(request)
        num_samples = len(self._partition[request.partition])
        context = self._context(request, states, self._batching.num_steps(num_samples))
        is_frozen = self._batching.freezes_norms(num_samples)
        return _Client(request=request, context=context, buffers=self._buffers, frozen_norms=is_frozen)

    def _make(self, request: TrainRequest) -> None:
        """The objective and the optimiser, unless they are there already."""
        if self._spec is not request.objective and self._spec != request.objective:
            self.objective = plugins.build("objective", request.objective.name, request.objective.settings)
            self._spec = request.objective
            self._contexts = {}
        if self._rate[0] != request.round:
            config = self._workload.config
            factor = config.client.schedule.build(request.round, config.rounds)
            if self._optimizer is None or factor != self._rate[1]:
                self._optimizer = make_optimizer(self._workload, self._model, round=request.round)
                self._displacements = {}
            self._rate = (request.round, factor)
            self._received, self._shared = ({}, {}), ({}, {})  # the next round's may be in the same memory
            self._contexts = {}

    def plan(self, clients: Sequence[_Client]) -> StackedPlan:
        """The steps of clients that have begun."""
        partitions = [client.request.partition for client in clients]
        seed, round = self._workload.config.seed, clients[0].request.round
        return stacked_plan(
            [self._partition[partition] for partition in partitions],
            (generator(seed, Purpose.BATCHES, round=round, partition=partition) for partition in partitions),
            self._batching,
        )

    def streams(self, clients: Sequence[_Client]) -> list[torch.Generator]:
        """What dropout and augmentation draw from, of each."""
        seed, round = self._workload.config.seed, clients[0].request.round
        return [
            torch_generator(seed, Purpose.TRAINING, round=round, partition=client.request.partition)
            for client in clients
        ]

    def make_optimizer(self) -> StackedOptimizer:
        """A fresh one.

        Raises:
            ConfigError: its rule is not known for stacks.
        """
        found = None if self._optimizer is None else stacked_optimizer(self._optimizer, self._model.parameters())
        if found is None:
            raise ConfigError(
                f"client.optimizer.name={self._workload.config.client.optimizer.name} was given, but client.path=cohort knows "
                "the rules of torch's SGD, Adam and AdamW only; use client.path=sequential."
            )
        return found

    def _context(self, request: TrainRequest, states: ClientStore, steps: int) -> LocalContext:
        """The same one for clients that differ in nothing an objective may read."""
        received, shared = self._received_of(request), self._shared_of(request)
        if not self.objective.has_state:
            context = self._contexts.get(steps)
            if context is not None and context.received is received and context.shared is shared:
                return context
        self._contexts[steps] = context = LocalContext(
            received=received,
            state=dict(
                self._packing.whole(load_state(self.objective, received, request, states, self._workload.device))
            ),
            shared=shared,
            unit_displacement=self._displacement(steps),
            sizes=self._sizes,
        )
        return context

    def _shared_of(self, request: TrainRequest) -> Tensors:
        """What the strategy sent, on the device; the same tensors for requests that carry the same ones."""
        came, _ = self._shared
        if request.shared is not came and not _same(request.shared, came):
            shared = self._packing.whole(to_device(request.shared, self._workload.device))
            self._shared = (request.shared, dict(shared))
        return self._shared[1]

    def _displacement(self, num_steps: int) -> float | None:
        if num_steps not in self._displacements and self._optimizer is not None:
            self._displacements[num_steps] = unit_displacement(self._optimizer, num_steps)
        return self._displacements[num_steps]

    def _received_of(self, request: TrainRequest) -> Tensors:
        """The parameters on the device, in the model's types; the same tensors for requests that carry the same ones."""
        came, _ = self._received
        if request.tensors is came or (came and _same(request.tensors, came)):
            return self._received[1]
        own, packing = self._model.state_dict(), self._packing
        whole = packing.whole(request.tensors)
        if {name: tensor.shape for name, tensor in request.tensors.items()} != {
            name: packing.shape(name, tensor.shape) for name, tensor in own.items()
        }:
            self._model.load_state_dict(dict(whole))  # says what does not fit, as on the sequential path
        found = {name: whole[name].to(tensor.device, tensor.dtype) for name, tensor in own.items()}
        received = {name: found.pop(name) for name, _ in self._model.named_parameters()}
        self._buffers = found
        self._received = (request.tensors, received)
        return received


def _attempted(work: Callable[[], T], request: TrainRequest) -> T | Failure:
    """What `work` gives, or the client's failure; a client's error is an answer, on every engine."""
    try:
        return work()
    except DiskFullError:
        raise  # not this client's fault: going on would lose one client after another
    except Exception as error:  # noqa: BLE001
        return failure_of(request.partition, error)


def _keep(client: _Client, parameters: Tensors, objective: Objective, states: ClientStore, packing: Packing) -> Tensors:
    """Save a client's state; what it sends besides its model."""
    request, context = client.request, client.context
    next_state = objective.next_state(parameters, context) if objective.has_state else {}
    if objective.has_state:
        states.save(request.partition, request.round, packing.packed(next_state))
    besides = packing.packed(objective.to_server(next_state, context))
    return {name: tensor.cpu() for name, tensor in besides.items()}


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _copies(trees: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Tensors of K clients as new ones [K, ...]."""
    if all(tree is trees[0] for tree in trees):
        return {name: tensor.expand(len(trees), *tensor.shape).clone() for name, tensor in trees[0].items()}
    return stacked_tensors(trees)


def _joined(stacks: Sequence[_Stack], clients: Sequence[_Client]) -> _Stack:
    """The clients of the stacks as one stack, in the order of `clients`."""
    found = {id(client): place for place, client in enumerate(client for stack in stacks for client in stack.clients)}
    places = [found[id(client)] for client in clients]
    losses = [loss for stack in stacks for loss in stack.train_losses]

    def ordered(trees: Sequence[Tensors]) -> Tensors:
        tensors = (
            trees[0] if len(trees) == 1 else {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}
        )
        given = torch.tensor(places, device=next(iter(tensors.values())).device) if tensors else torch.tensor(places)
        return {name: tensor.index_select(0, given) for name, tensor in tensors.items()}

    return _Stack(
        clients=clients,
        theta=ordered([stack.theta for stack in stacks]),
        buffers=ordered([stack.buffers for stack in stacks]),
        train_losses=[losses[place] for place in places],
    )
