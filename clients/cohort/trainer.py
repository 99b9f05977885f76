"""Train the clients of a round together: parameters are stacked as [K, ...], and each step covers all clients.

The results equal those of `clients.trainer.SequentialTrainer` up to rounding: the same batches in the same order, the
same objective, optimizer, clipping, states, and replies.  `clients.cohort.trial` refuses before a run whatever the
stack could not reproduce.

A client that cannot start, for example because its state is missing, is a failure and not part of the stack.  If a
stack raises, its clients are trained one by one, so that only the faulty one fails.  A client that diverges fills only
its own slice with NaN.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from clients.batches import Batching
from clients.cohort.context import cohort_context, same_tensors, stacked_tensors
from clients.cohort.optim import CohortOptimizer
from clients.cohort.plan import cohort_plan
from clients.cohort.training import CohortTraining
from clients.local_trainers import chunks_of
from clients.state.store import ClientStore
from clients.trainer import learning_rate, load_state, to_device
from fedsign import plugins
from fedsign.errors import DiskFullError
from fedsign.models.batch_norm import has_batch_norm
from fedsign.models.transform import Packing, packing_of
from fedsign.objectives.base import LocalContext
from fedsign.optim.base import optimizer_of
from fedsign.optim.displacement import unit_displacement
from fedsign.records import CohortReply, Failure, Tensors, TrainReply, TrainRequest, failure_of, roles_of
from fedsign.seeding import Purpose, generator, torch_generator
from fedsign.workload import Workload

T = TypeVar("T")

# K = clients in a stack, S = steps of the client with the most, B = samples of the largest batch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Client:
    """A client ready to train."""

    request: TrainRequest
    round: "_Round"
    context: LocalContext
    buffers: Tensors  # as received
    frozen_norms: bool  # see [Note: batches of one] in clients.batches


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainedChunk:
    """Trained clients: their models' tensors [K, ...] by name, and mean losses of the last epoch."""

    clients: Sequence[_Client]
    tensors: Tensors
    train_losses: Sequence[float]


class CohortTrainer:
    """Trains `chunk` clients at a time; results depend on `chunk` by rounding only."""

    def __init__(self, workload: Workload, *, chunk: int) -> None:
        client = workload.config.client
        self._workload, self._chunk = workload, chunk
        self._model = model = workload.make_model().train()
        self._roles, self._packing = roles_of(self._model), packing_of(self._model)
        self._batching = Batching.of(client, join_last=has_batch_norm(self._model))
        self._learning_rate = learning_rate(workload)
        # only read for its groups and settings; `CohortOptimizer` takes the steps
        self._optimizer_at = lru_cache(maxsize=1)(
            lambda lr: optimizer_of(client.optimizer, model, lr, client.weight_decay)
        )
        self._round: _Round | None = None
        self._training = CohortTraining(workload, self._model)

    def train_many(
        self, requests: Iterable[TrainRequest], states: ClientStore
    ) -> Iterator[TrainReply | CohortReply | Failure]:
        """Yield each chunk's failures and its replies as one stack; different objectives or rounds are not mixed."""
        for chunk in chunks_of(requests, self._chunk):
            started = [_attempted(partial(self._start, request, states), request) for request in chunk]
            yield from (client for client in started if isinstance(client, Failure))
            for trained in self._train([client for client in started if isinstance(client, _Client)]):
                if isinstance(trained, Failure):
                    yield trained
                else:
                    yield from self._replies(trained, states)

    def _start(self, request: TrainRequest, states: ClientStore) -> _Client:
        """Prepare a client; the round's common part is made by the first one, and its errors hit every client."""
        if self._round is None or not self._round.is_of(request):
            optimizer = self._optimizer_at(self._learning_rate(request.round))
            self._round = _Round(request, self._workload, self._model, optimizer)
        num_samples = len(self._workload.partition[request.partition])
        received, buffers = self._round.received(request.tensors)
        return _Client(
            request=request,
            round=self._round,
            context=self._round.context(request, received, states, self._batching.num_steps(num_samples)),
            buffers=buffers,
            frozen_norms=self._batching.freezes_norms(num_samples),
        )

    def _train(self, clients: Sequence[_Client]) -> list[_TrainedChunk | Failure]:
        """Train the clients in one stack, or individually if that raises."""
        if not clients:
            return []
        try:
            return [self._train_stack(clients)]
        except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
            if len(clients) == 1:
                return [failure_of(clients[0].request.partition, error)]
            return [result for client in clients for result in self._train([client])]

    def _train_stack(self, clients: Sequence[_Client]) -> _TrainedChunk:
        # BatchNorm's mode belongs to the module, so clients in eval and training mode need separate stacks.
        frozen = clients[0].frozen_norms
        if others := [client for client in clients if client.frozen_norms != frozen]:
            alike = [client for client in clients if client.frozen_norms == frozen]
            return _joined([self._train_stack(alike), self._train_stack(others)], clients)
        seed, round, objective = self._workload.config.seed, clients[0].request.round, clients[0].round.objective
        partitions = [client.request.partition for client in clients]
        plan = cohort_plan(
            [self._workload.partition[partition] for partition in partitions],
            (generator(seed, Purpose.BATCHES, round=round, partition=partition) for partition in partitions),
            self._batching,
        )
        ordered = [clients[index] for index in plan.order]
        # copies: if the stack raises, its clients start again from the same values
        theta = _copies([client.context.received for client in ordered])
        buffers = _copies([client.buffers for client in ordered])
        streams = [
            torch_generator(seed, Purpose.TRAINING, round=round, partition=client.request.partition)
            for client in ordered
            if self._training.needs_streams
        ]
        losses = self._training.minimize(
            theta,
            buffers,
            objective,
            CohortOptimizer(clients[0].round.optimizer, self._model.parameters()),
            plan,
            cohort_context([client.context for client in ordered]),
            streams,
            frozen_norms=frozen,
        )
        trained = _TrainedChunk(clients=ordered, tensors=theta | buffers, train_losses=losses)
        # back in the order of the requests, in which the server sums replies
        return trained if plan.order == sorted(plan.order) else _joined([trained], clients)

    def _replies(self, stack: _TrainedChunk, states: ClientStore) -> Iterator[TrainReply | CohortReply | Failure]:
        """Save the clients' states, then reply as one stack."""
        objective, partitions = stack.clients[0].round.objective, [each.request.partition for each in stack.clients]
        tensors = self._packing.packed(stack.tensors)
        replies = CohortReply(
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
                _attempted(partial(self._keep, stack, index, states), client.request)
                for index, client in enumerate(stack.clients)
            ]
            failed = [index for index, extra in enumerate(kept) if isinstance(extra, Failure)]
            yield from (extra for extra in kept if isinstance(extra, Failure))
            replies = replies.without(failed) if failed else replies
            extras = [extra for extra in kept if not isinstance(extra, Failure)]
            # not stackable: let the server judge which are wrong
            if not all(_shapes(extra) == _shapes(extras[0]) for extra in extras):
                yield from (replace(one, extra=extra) for one, extra in zip(replies.replies(), extras, strict=True))
                return
            replies = replace(replies, extra=stacked_tensors(extras) if extras else {})
        if len(replies):
            yield replies

    def _keep(self, stack: _TrainedChunk, index: int, states: ClientStore) -> Tensors:
        """Save a client's state; return its auxiliary tensors."""
        client, packing = stack.clients[index], self._packing
        request, context, objective, next_state = client.request, client.context, client.round.objective, Tensors()
        if objective.has_state:
            trained = {name: stack.tensors[name][index] for name in context.received}
            next_state = objective.next_state(trained, context)
            states.save(request.partition, request.round, packing.packed(next_state))
        return to_device(packing.packed(objective.to_server(next_state, context)), torch.device("cpu"))


class _Round:
    """The common part of a round's clients: the objective, and the received tensors, converted once."""

    def __init__(
        self, request: TrainRequest, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._number, self._spec = request.round, request.objective
        self._workload, self.optimizer = workload, optimizer
        self._packing = packing = packing_of(model)
        self._sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        self._contexts: dict[int, LocalContext] = {}  # by number of steps, which `unit_displacement` depends on
        self.objective = plugins.build("objective", self._spec.name, self._spec.settings)
        self.received = _once(partial(_received, model, packing))
        self._shared = _once(lambda tensors: dict(packing.whole(to_device(tensors, workload.device))))

    def is_of(self, request: TrainRequest) -> bool:
        """Whether a request belongs to this round and objective."""
        return self._number == request.round and self._spec == request.objective

    def context(self, request: TrainRequest, received: Tensors, states: ClientStore, num_steps: int) -> LocalContext:
        """A client's context, shared between clients if nothing that an objective may read differs."""
        shared, known = self._shared(request.shared), self._contexts.get(num_steps)
        is_same = known is not None and known.received is received and known.shared is shared
        if known is not None and is_same and not self.objective.has_state:
            return known
        state = load_state(self.objective, received, request, states, self._workload.device)
        self._contexts[num_steps] = context = LocalContext(
            received=received,
            state=dict(self._packing.whole(state)),
            shared=shared,
            unit_displacement=unit_displacement(self.optimizer, num_steps),
            sizes=self._sizes,
        )
        return context


def _received(model: nn.Module, packing: Packing, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The received parameters and buffers on the device, in the model's dtypes."""
    own, whole = model.state_dict(), packing.whole(tensors)  # without tied ones: `clients.cohort.trial` refuses them
    if {name: tensor.shape for name, tensor in tensors.items()} != {
        name: packing.shape(name, tensor.shape) for name, tensor in own.items()
    }:
        model.load_state_dict(dict(whole))  # raises the same error as the sequential path
    converted = {name: whole[name].to(tensor.device, tensor.dtype) for name, tensor in own.items()}
    return {name: converted.pop(name) for name, _ in model.named_parameters()}, converted


def _once(convert: Callable[[Tensors], T]) -> Callable[[Tensors], T]:
    """Cache a conversion for the last tensors, compared by identity."""
    last: list[tuple[Tensors, T]] = []

    def converted(tensors: Tensors) -> T:
        if not last or not same_tensors(tensors, last[0][0]):
            last[:] = [(tensors, convert(tensors))]  # holds on to `tensors`, so that no other tensor gets its identity
        return last[0][1]

    return converted


def _attempted(work: Callable[[], T], request: TrainRequest) -> T | Failure:
    """The result of `work`, or the client's failure if it raises."""
    try:
        return work()
    except DiskFullError:
        raise  # not the client's fault; continuing would lose one client after another
    except Exception as error:  # noqa: BLE001
        return failure_of(request.partition, error)


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _copies(trees: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Copy the tensors of K clients into new ones [K, ...]."""
    if all(tree is trees[0] for tree in trees):
        return {name: tensor.expand(len(trees), *tensor.shape).clone() for name, tensor in trees[0].items()}
    return stacked_tensors(trees)


def _joined(stacks: Sequence[_TrainedChunk], clients: Sequence[_Client]) -> _TrainedChunk:
    """Concatenate stacks, in the order of `clients`."""
    index_of = {
        id(client): index for index, client in enumerate(client for stack in stacks for client in stack.clients)
    }
    indices = [index_of[id(client)] for client in clients]
    losses = [loss for stack in stacks for loss in stack.train_losses]
    tensors = stacks[0].tensors
    if len(stacks) > 1:
        tensors = {name: torch.cat([stack.tensors[name] for stack in stacks]) for name in tensors}
    order = torch.tensor(indices, device=next(iter(tensors.values())).device)
    return _TrainedChunk(
        clients=clients,
        tensors={name: tensor.index_select(0, order) for name, tensor in tensors.items()},
        train_losses=[losses[index] for index in indices],
    )
