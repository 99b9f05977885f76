"""Send requests to a round's clients, validate their replies, and account for both.

There are two transports.  `fedsign.flower.partition_grid.PartitionGrid` sends Flower messages, for every engine and
strategy.  `DirectExchange` passes requests of our own strategies to a trainer in this process.  Requests, checks,
failures and metrics are the same, but there are no messages, which for small models took longer than training.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from sys import maxsize
from typing import Protocol

from torch import Tensor

from fedsign.errors import ReplyError, RoundError
from fedsign.federation import counters
from fedsign.federation.aggregation import LARGEST_VALUE, Dispersion, in_slot_order, is_finite
from fedsign.federation.encoding import UpdateEncoding, converted
from fedsign.records import (
    LOST_UPDATES,
    CohortReply,
    CohortRequest,
    Failure,
    Reply,
    Role,
    Tensors,
    TrainReply,
    TrainRequest,
    failure_of,
    replied,
)
from fedsign.storage.results import Record

MaxExamples = Callable[[int], int]  # partition -> upper limit of a reply's num_examples
TrainMany = Callable[[Sequence[TrainRequest]], Iterator[TrainReply | CohortReply | Failure]]


@dataclass(slots=True)
class ClientLedger:
    """The version ledger: which version of its state each client has, now and at each checkpoint.

    See [Note: versions of client state] in fedsign.records.
    """

    versions: dict[int, int] = field(default_factory=dict)
    checkpoints: dict[int, dict[int, int]] = field(default_factory=dict)  # round -> versions at that time
    owners: dict[int, str] = field(default_factory=dict)  # client -> site, if sites are registered

    def commit(self, round: int, partitions: Iterable[int]) -> None:
        """End a round: the states of accepted replies become the clients' current versions."""
        self.versions.update(dict.fromkeys(partitions, round))

    def hand_over(self, partition: int, site: str) -> None:
        """Assign a client to a site; a new site has none of the client's state."""
        if self.owners.get(partition, site) != site:
            self.versions.pop(partition, None)  # version 0: the initial state
        self.owners[partition] = site

    def checkpoint(self, round: int, *, on_disk: Iterable[int]) -> None:
        """Record a checkpoint; versions of checkpoints no longer on disk are forgotten."""
        self.checkpoints[round] = dict(self.versions)
        self.checkpoints = {kept: self.checkpoints[kept] for kept in on_disk if kept in self.checkpoints}

    def needed(self, partition: int) -> set[int]:
        """All versions of a client's state that may still be requested."""
        tables = (self.versions, *self.checkpoints.values())
        return {table[partition] for table in tables if partition in table}


@dataclass(slots=True)
class Traffic:
    """The account of a round's requests; bytes count tensors only."""

    sent: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    with_state: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)  # asked, but no longer needed
    left_out: list[int] = field(default_factory=list)  # accepted, but the strategy gave them no weight
    bytes_down: int = 0
    bytes_up: int = 0
    # of the accepted replies; a client may withhold its loss
    num_examples: list[int] = field(default_factory=list)
    train_losses: list[float | None] = field(default_factory=list)
    counters: dict[int, Tensors] = field(default_factory=dict)  # client -> counters that it has moved, if they count
    lost_updates: list[float] = field(default_factory=list)  # shares, of clients that measured them
    dispersion: Dispersion = field(default_factory=Dispersion)

    def leave_out(self, partitions: Sequence[int]) -> None:
        """Note whose replies had no part in the mean; like those of failed clients, their states do not count."""
        self.left_out = list(partitions)
        self.with_state = [each for each in self.with_state if each not in self.left_out]
        self.counters = {each: own for each, own in self.counters.items() if each not in self.left_out}

    def record(self) -> Record:
        """The round's record; the training loss is the clients' mean, weighted by samples."""
        weighted = [
            (num, loss) for num, loss in zip(self.num_examples, self.train_losses, strict=True) if loss is not None
        ]
        num_examples = sum(num for num, _ in weighted)
        update_norm, client_drift = self.dispersion.metrics()
        return {
            "train_loss": sum(num * loss for num, loss in weighted) / num_examples if num_examples else None,
            "clients": self.sent,
            "num_replies": len(self.accepted),
            "failures": [{"client": failure.partition, "reason": failure.reason} for failure in self.failures],
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "update_norm": update_norm,
            "client_drift": client_drift,
            **({"surplus": self.surplus} if self.surplus else {}),
            **({"left_out": self.left_out} if self.left_out else {}),
            **({"lost_updates": fmean(self.lost_updates)} if self.lost_updates else {}),
        }


class ReplyObserver(Protocol):
    """Observes the parameters of each accepted reply, and those that its client received."""

    def add(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Observe one client."""
        ...

    def add_stack(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Observe several clients, [K, ...]."""
        ...


class RoundHook(Protocol):
    """What a capability adds to the rounds of a run, at the extension point `round_hook`.

    The extension is a function `(workload, strategy, folder, *, round) -> RoundHook | None`; `round` is the last
    completed round.
    """

    stop: str = ""
    """Why the run ends with the round that was evaluated last; empty if it goes on."""

    def begin(self, round: int) -> ReplyObserver | None:
        """Called before clients are asked; returns an observer of the round's accepted replies."""
        return None

    def end(self, traffic: Traffic) -> Record:
        """Called after the server update and before evaluation; returns additions to the round's record."""
        return {}

    def on_outputs(self, outputs: Tensor, targets: Tensor) -> None:
        """Called if the server evaluates, with the outputs for its test samples, or what the task keeps of them."""
        return

    def evaluated(self, record: Record, model: Callable[[], Mapping[str, Tensor]]) -> None:
        """Called after evaluation, with the complete record and what returns the evaluated model; may set `stop`."""
        return

    def write(self, record: Record, *, durable: bool) -> Record:
        """Called before the record is written, to write own files; returns the record as it may be published."""
        return record


class Exchange:
    """Common base of both transports.

    Every reply must confirm the model's `roles`, and may count `max_examples` samples at most.  `traffic` is the
    account of the last round.  With `num_wanted`, a round ends after that many accepted replies.
    """

    def __init__(
        self, num_partitions: int, roles: Mapping[str, Role], max_examples: MaxExamples = lambda partition: maxsize
    ) -> None:
        self._num_partitions, self._roles, self._max_examples = num_partitions, dict(roles), max_examples
        self._parameters = [name for name, role in roles.items() if role is Role.PARAMETER]
        self._buffers = [name for name, role in roles.items() if role is Role.BUFFER]
        self.moved_counters: set[str] = set()  # see fedsign.federation.counters
        self.keeps_counters = False  # of each accepted reply
        self.ledger = ClientLedger()
        self.encoding: UpdateEncoding | None = None
        self.traffic = Traffic()
        self.observers: Sequence[ReplyObserver] = ()
        self.num_wanted: int | None = None

    def _count(
        self,
        reply: Reply,
        served: Tensors,
        sent: Tensors,
        partitions: Sequence[int],
        num_examples: Sequence[int],
        metrics: Sequence[Mapping[str, float]],
    ) -> None:
        """Account for accepted replies; `sent` is what was sent in place of the models."""
        traffic, known = self.traffic, set[str]() if self.keeps_counters else self.moved_counters
        buffers = {name: reply.tensors[name] for name in self._buffers if name in reply.tensors and name not in known}
        moved = counters.moved(buffers, served) if buffers else {}
        self.moved_counters |= moved.keys()
        if self.keeps_counters:
            is_stack = isinstance(reply, CohortReply)
            for index, partition in enumerate(partitions):
                # copies, since a reply's memory may be reused
                traffic.counters[partition] = {
                    name: (own[index] if is_stack else own).clone() for name, own in moved.items()
                }
        traffic.accepted += partitions
        traffic.with_state += partitions if reply.has_state else []
        traffic.bytes_up += sum(tensor.nbytes for tensor in (*sent.values(), *reply.extra.values()))
        traffic.num_examples += num_examples
        traffic.train_losses += [each.get("train-loss") for each in metrics]
        traffic.lost_updates += [each[LOST_UPDATES] for each in metrics if LOST_UPDATES in each]


class DirectExchange(Exchange):
    """Exchange with clients trained in this process; see the module docstring."""

    def __init__(
        self,
        train_many: TrainMany,
        *,
        num_partitions: int,
        roles: Mapping[str, Role],
        max_examples: MaxExamples = lambda partition: maxsize,
    ) -> None:
        super().__init__(num_partitions, roles, max_examples)
        self._train_many = train_many
        self._received: Tensors = {}  # parameters in this round's request

    def train(self, request: CohortRequest) -> Iterator[Reply]:
        """Yield accepted replies in cohort order, as early as possible; batched ones at their first client's slot."""
        check_addresses(request.cohort, self._num_partitions)
        self._received = {name: request.tensors[name] for name in self._parameters}
        self.traffic = Traffic(
            sent=list(request.cohort),
            # everyone has built the frozen tensors
            bytes_down=bytes_down(request.cohort, replied(request.tensors, self._roles), request.shared, self.encoding),
        )
        return self._good_replies(request)

    def _good_replies(self, request: CohortRequest) -> Iterator[Reply]:
        """Accounted in slot order, whatever the order of arrival, so sums are bit-identical."""
        for reply in in_slot_order(self._arrivals(request)):
            match reply:
                case Failure():
                    self.traffic.failures.append(reply)
                case TrainReply():
                    reply = self._take_in(reply, request)
                    if reply is not None:
                        yield reply
                case CohortReply() if self.encoding is not None:
                    yield from filter(None, (self._take_in(one, request) for one in reply.replies()))
                case CohortReply():
                    if len(good := self._take_in_stack(reply, request)):
                        yield good
                    del good
            del reply  # before the next client trains

    def _arrivals(self, request: CohortRequest) -> Iterator[tuple[int, Reply | Failure | None]]:
        """(slot, result); None for a slot whose reply is among batched ones at an earlier slot.

        Replies are never late here, so surplus clients are asked only to replace failed ones.
        """
        reserve = list(enumerate(request.cohort))
        num_wanted = self.num_wanted or len(reserve)
        # `accepted` is complete here: the consumer takes replies in slot order, and a batch's slots have no gap
        while reserve and (num := num_wanted - len(self.traffic.accepted)) > 0:
            sampled, reserve = dict(reserve[:num]), reserve[num:]
            yield from self._arrivals_of({partition: slot for slot, partition in sampled.items()}, request)
        self.traffic.surplus = [partition for _, partition in reserve]

    def _arrivals_of(
        self, waiting: dict[int, int], request: CohortRequest
    ) -> Iterator[tuple[int, Reply | Failure | None]]:
        """Train the clients in `waiting` (client -> slot)."""
        requests = [
            TrainRequest(
                round=request.round,
                partition=partition,
                tensors=request.tensors,
                objective=request.objective,
                state_version=self.ledger.versions.get(partition, 0),
                needed_versions=frozenset(self.ledger.needed(partition)),
                shared=request.shared,
            )
            for partition in waiting
        ]
        for result in self._train_many(requests):
            if isinstance(result, CohortReply):
                first, *others = sorted(waiting.pop(partition) for partition in result.partitions)
                yield first, result
                yield from ((slot, None) for slot in others)
            else:
                yield waiting.pop(result.partition), result
            del result
        for partition, slot in waiting.items():
            yield slot, Failure(partition=partition, reason="the trainer gave no reply")

    def _take_in(self, reply: TrainReply, request: CohortRequest) -> TrainReply | None:
        """Validate a reply and account for it, or for its failure; returns it decoded."""
        try:
            check_claims(reply, round=request.round, roles=self._roles)
            sent = reply.tensors
            if self.encoding is not None:
                # a lossy encoding must act as it does over messages
                message = converted(self.encoding.encode, reply, request.tensors)
                sent, reply = message.tensors, converted(self.encoding.decode, message, request.tensors)
            check_shapes(
                reply.tensors,
                reply.extra,
                like=replied(request.tensors, self._roles),
                is_partial=self.encoding is not None,
            )
            check_numbers(reply, max_examples=self._max_examples)
            whole = {**self._received, **reply.tensors}  # tensors not sent are unchanged
            auxiliary = {name: tensor for name, tensor in reply.tensors.items() if name not in self._received}
            check_finite(auxiliary, reply.extra)  # parameters are checked by `dispersion.add`, in the same pass
            if not self.traffic.dispersion.add(whole, self._received):
                check_finite(reply.tensors, {})  # raises, naming the tensor
        except ReplyError as error:
            self.traffic.failures.append(failure_of(reply.partition, error))
            return None
        for observer in self.observers:
            observer.add(whole, self._received)
        self._count(reply, request.tensors, sent, [reply.partition], [reply.num_examples], [reply.metrics])
        return reply

    def _take_in_stack(self, stack: CohortReply, request: CohortRequest) -> CohortReply:
        """Validate batched replies: account for valid ones, record failures for the others; returns the valid ones."""
        first = {name: tensor[0] for name, tensor in stack.tensors.items()}
        try:
            check_claims(stack, round=request.round, roles=self._roles)
            extra = {name: tensor[0] for name, tensor in stack.extra.items()}
            check_shapes(first, extra, like=replied(request.tensors, self._roles))
        except ReplyError as error:  # names, shapes and dtypes are common to all batched replies
            self.traffic.failures += [failure_of(partition, error) for partition in stack.partitions]
            return stack.without(range(len(stack)))
        auxiliary = [tensor for name, tensor in stack.tensors.items() if name not in self._received]
        auxiliary += stack.extra.values()
        numbers = [value for values in stack.metrics.values() for value in values]
        is_bounded = all(
            1 <= num <= self._max_examples(each) for each, num in zip(stack.partitions, stack.num_examples, strict=True)
        ) and all(map(isfinite, numbers))
        if not (
            is_bounded
            and all(is_finite(tensor, LARGEST_VALUE) for tensor in auxiliary)
            and self.traffic.dispersion.add_stack(stack.tensors, self._received)
        ):
            stack = self._without_diverged(stack)
            if len(stack):
                self.traffic.dispersion.add_stack(stack.tensors, self._received)
        if len(stack):
            for observer in self.observers:
                observer.add_stack(stack.tensors, self._received)
            each = [{name: values[index] for name, values in stack.metrics.items()} for index in range(len(stack))]
            self._count(stack, request.tensors, stack.tensors, stack.partitions, stack.num_examples, each)
        return stack

    def _without_diverged(self, stack: CohortReply) -> CohortReply:
        diverged = []
        for index, reply in enumerate(stack.replies()):
            try:
                check_numbers(reply, max_examples=self._max_examples)
                check_finite(reply.tensors, reply.extra)
            except ReplyError as error:
                self.traffic.failures.append(failure_of(reply.partition, error))
                diverged.append(index)
        return stack.without(diverged)


def check_addresses(partitions: Sequence[int], num_partitions: int) -> None:
    """Raise RoundError unless the addressed clients exist and are distinct."""
    unknown = [partition for partition in partitions if not 0 <= partition < num_partitions]
    twice = [partition for partition, count in Counter(partitions).items() if count > 1]
    if unknown or twice:
        raise RoundError(
            f"the strategy addressed the clients {list(partitions)}; expected different ones from 0 to "
            f"{num_partitions - 1}: correct its sampling."
        )


def check_claims(reply: Reply, *, round: int, roles: Mapping[str, Role]) -> None:
    """Raise ReplyError unless the reply is for this round and a model with these roles."""
    if reply.round != round:
        raise ReplyError(f"the reply is for round {reply.round}; expected round {round}.")
    if reply.roles != roles:
        raise ReplyError("the reply names other parameters and buffers than the model has.")


def check_numbers(reply: TrainReply, *, max_examples: MaxExamples) -> None:
    """Raise ReplyError unless num_examples is within limits and all metrics are finite."""
    num, most = reply.num_examples, max_examples(reply.partition)
    if not num >= 1:  # NaN too
        raise ReplyError(f"the reply counts num-examples={num}; expected 1 or more.")
    if num > most:
        raise ReplyError(
            f"the reply counts num-examples={num}; expected {most} at most: for a site that holds more raise "
            "server.max_examples."
        )
    for name, value in reply.metrics.items():
        if not isfinite(value):
            check_finite(reply.tensors, reply.extra)  # a more specific error, if tensors diverged too
            raise ReplyError(
                f"the reply's metric '{name}' is {value}; expected a finite number: its training diverged."
            )


def check_shapes(tensors: Tensors, extra: Tensors, *, like: Tensors, is_partial: bool = False) -> None:
    """Compare a client's tensors with the model, or a part of it, that it received.

    Raises:
        ReplyError: names, shapes or dtypes differ, or an auxiliary tensor matches no parameter.
    """
    missing, unknown = like.keys() - tensors.keys(), tensors.keys() - like.keys()
    if unknown or (missing and not is_partial):
        raise ReplyError(
            f"the reply's tensors are not the model's: missing {sorted(missing)}, unknown {sorted(unknown)}."
        )
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise ReplyError(f"tensor '{name}' is {_kind(tensor)}; expected {_kind(like[name])}.")
    for name, tensor in extra.items():
        if name not in like or tensor.shape != like[name].shape:
            raise ReplyError(
                f"besides the model came a tensor '{name}' of shape {list(tensor.shape)}; expected names and "
                "shapes of parameters."
            )


def check_finite(tensors: Tensors, extra: Tensors) -> None:
    """Raise ReplyError for values that are NaN, infinite, or so large that their squares or sums would be."""
    for auxiliary, group in (("", tensors), (" besides the model", extra)):
        for name, tensor in group.items():
            if not is_finite(tensor, LARGEST_VALUE):
                held = f"values beyond {LARGEST_VALUE:.1e}" if is_finite(tensor) else "NaN or infinite values"
                raise ReplyError(f"tensor '{name}'{auxiliary} holds {held}: the client's training diverged.")


def bytes_down(cohort: Sequence[int], model: Tensors, shared: Tensors, encoding: UpdateEncoding | None) -> int:
    """What a round's clients download: the whole model, or what they lack of it, plus auxiliary tensors."""
    sizes = {name: tensor.nbytes for name, tensor in model.items()}
    auxiliary = sum(tensor.nbytes for tensor in shared.values())
    if encoding is None:
        return len(cohort) * (sum(sizes.values()) + auxiliary)
    return sum(encoding.bytes_down(partition, sizes) for partition in cohort) + len(cohort) * auxiliary


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
