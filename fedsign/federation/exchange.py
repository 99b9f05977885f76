"""What goes out to the clients of a round, what comes back, and the account that is kept of it.

Two ways lead to the clients.  `fedsign.flower.partition_grid.PartitionGrid` sends Flower messages; it serves every
engine and every strategy.  `DirectExchange` hands the requests of our own strategies to a trainer in this process:
the same requests, checks, failures and figures without a message for each client, which for small models took
longer than their training.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from sys import maxsize
from typing import Any, Protocol

from torch import Tensor

from fedsign.errors import ReplyError, RoundError
from fedsign.federation.aggregation import LARGEST_VALUE, Spread, in_slot_order, is_finite
from fedsign.records import (
    CohortRequest,
    Failure,
    Reply,
    ReplyStack,
    Role,
    Tensors,
    TrainReply,
    TrainRequest,
    failure_of,
)
from fedsign.storage.results import Line

MaxExamples = Callable[[int], int]  # of a partition, what a reply may count at most
TrainMany = Callable[[Sequence[TrainRequest]], Iterator[TrainReply | ReplyStack | Failure]]


@dataclass(slots=True)
class ClientLedger:
    """Which version of its state each client has that the server counts on, now and in each checkpoint.

    See [Note: versions of client state] in fedsign.records.
    """

    versions: dict[int, int] = field(default_factory=dict)
    checkpoints: dict[int, dict[int, int]] = field(default_factory=dict)  # round -> versions then
    owners: dict[int, str] = field(default_factory=dict)  # the site of a client, where sites are registered

    def commit(self, round: int, partitions: Iterable[int]) -> None:
        """The round is done: the states that came with accepted replies are the clients' states now."""
        self.versions.update(dict.fromkeys(partitions, round))

    def hand_over(self, partition: int, site: str) -> None:
        """A client is this site's from now on; another site than before has no state of it."""
        if self.owners.get(partition, site) != site:
            self.versions.pop(partition, None)
        self.owners[partition] = site

    def checkpoint(self, round: int, *, on_disk: Iterable[int]) -> None:
        """A checkpoint was written; only those on disk can still be resumed from."""
        self.checkpoints[round] = dict(self.versions)
        self.checkpoints = {kept: self.checkpoints[kept] for kept in on_disk if kept in self.checkpoints}

    def needed(self, partition: int) -> set[int]:
        """The versions of a client's state that could still be asked for."""
        tables = (self.versions, *self.checkpoints.values())
        return {table[partition] for table in tables if partition in table}


@dataclass(slots=True)
class Traffic:
    """What happened to the requests of one round; bytes are those of the tensors."""

    sent: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    with_state: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)  # were asked, and are not needed any more
    bytes_down: int = 0
    bytes_up: int = 0
    weighted_losses: list[tuple[int, float]] = field(default_factory=list)
    spread: Spread = field(default_factory=Spread)

    def record(self) -> Line:
        """What a round's record says of it; the training loss is the clients' mean, weighted by samples."""
        num_examples = sum(num for num, _ in self.weighted_losses)
        update_norm, client_drift = self.spread.figures()
        return {
            "train_loss": sum(num * loss for num, loss in self.weighted_losses) / num_examples
            if num_examples
            else None,
            "clients": self.sent,
            "num_replies": len(self.accepted),
            "failures": [{"client": failure.partition, "reason": failure.reason} for failure in self.failures],
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "update_norm": update_norm,
            "client_drift": client_drift,
            **({"surplus": self.surplus} if self.surplus else {}),
        }


class ReplyObserver(Protocol):
    """Sees the parameters of each good reply of a round, and those that its client received."""

    def add(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """One client's."""
        ...

    def add_stack(self, local: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> None:
        """Those of several clients, [K, ...]."""
        ...


class UpdateEncoding:
    """What travels in place of a model, at the extension point `update_encoding`; this one leaves it as it is.

    The extension is a function `(workload) -> UpdateEncoding | None`.  In process one object serves the server and all clients;
    over messages the server and each request have one of their own.  So `encode` and `decode` keep nothing between calls.
    """

    def encode(self, reply: TrainReply, received: Tensors) -> Tensors:
        """At the client: what it sends in place of `reply.tensors`, whatever names, shapes and types (of `codec`) that has.

        `received` are the tensors of its request.  What is random is drawn from (seed, purpose, round, partition).
        """
        return reply.tensors

    def decode(self, reply: TrainReply, received: Tensors) -> Tensors:
        """At the server: the model's tensors of a reply that holds encoded ones.

        They are then checked like those of any reply, except that names may be missing: such a tensor's update is zero, and its mean
        is over those who sent it.  Raises ReplyError where the reply cannot be meant; any other error is also that client's failure.
        """
        return reply.tensors

    def lacking(self, partition: int, names: Iterable[str]) -> list[str]:
        """The tensors that a client must download to have the model that is served now."""
        return list(names)

    def digests(self, model: Tensors) -> dict[str, str]:
        """Name -> digest of each tensor, by which a client that keeps what it receives knows those that it is not sent."""
        return {}

    def commit(self, round: int, accepted: Iterable[int], *, before: Tensors, after: Tensors) -> None:
        """The round is done: `before` was served in it, `after` will be in the next; those who replied hold `before`."""

    def state(self) -> tuple[Mapping[str, Any], Mapping[str, Mapping[int, int]]]:
        """`facts` and `tables` of a checkpoint."""
        return {}, {}

    def load_state(self, facts: Mapping[str, Any], tables: Mapping[str, Mapping[int, int]]) -> None:
        """Take them back."""


class RoundHook(Protocol):
    """What a capability adds to a run's rounds, at the extension point `round_hook`.

    The extension is a function `(workload, strategy, folder, *, round) -> RoundHook | None`, where `round` is the last one played.
    """

    def begin(self, round: int) -> ReplyObserver | None:
        """Before the clients are asked: who is to see the round's good replies."""
        return None

    def end(self, traffic: Traffic) -> Line:
        """After the server's move, before the model is evaluated: what the round's record says besides."""
        return {}

    def write(self, record: Line, *, durable: bool) -> Line:
        """Before the record is written: write files of one's own; returns the record as it may be published."""
        return record


class Exchange:
    """Of either kind.  `roles` are the model's, which every reply has to confirm; `observers` see each good reply.

    `max_examples` is what a client's reply may count at most.  `traffic` tells of the last round.  With `num_wanted` a round ends with so many good replies.
    """

    def __init__(
        self, num_partitions: int, roles: Mapping[str, Role], max_examples: MaxExamples = lambda partition: maxsize
    ) -> None:
        self._num_partitions, self._roles, self._max_examples = num_partitions, dict(roles), max_examples
        self._parameters = [name for name, role in roles.items() if role is Role.PARAMETER]
        self.ledger = ClientLedger()
        self.encoding: UpdateEncoding | None = None
        self.traffic = Traffic()
        self.observers: Sequence[ReplyObserver] = ()
        self.num_wanted: int | None = None

    def _count(
        self,
        reply: Reply,
        sent: Tensors,
        partitions: Sequence[int],
        num_examples: Sequence[int],
        metrics: Sequence[Mapping[str, float]],
    ) -> None:
        """Add the good replies of some clients to the account; `sent` is what came in place of their models."""
        traffic = self.traffic
        traffic.accepted += partitions
        traffic.with_state += partitions if reply.has_state else []
        traffic.bytes_up += sum(tensor.nbytes for tensor in (*sent.values(), *reply.extra.values()))
        traffic.weighted_losses += [
            (num, each["train-loss"])
            for num, each in zip(num_examples, metrics, strict=True)
            if each.get("train-loss") is not None
        ]


class DirectExchange(Exchange):
    """With clients that are trained in this process; see the module."""

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
        self._received: Tensors = {}  # the parameters of this round's request

    def train(self, request: CohortRequest) -> Iterator[Reply]:
        """The good replies in the order of the cohort, as soon as that can be; a stack stands where its first client does."""
        check_addresses(request.cohort, self._num_partitions)
        self._received = {name: request.tensors[name] for name in self._parameters}
        self.traffic = Traffic(
            sent=list(request.cohort),
            bytes_down=bytes_down(request.cohort, request.tensors, request.shared, self.encoding),
        )
        return self._good_replies(request)

    def _good_replies(self, request: CohortRequest) -> Iterator[Reply]:
        """Accounted in the order of the slots, whatever the order of arrival: sums keep their bits."""
        for reply in in_slot_order(self._arrivals(request)):
            match reply:
                case Failure():
                    self.traffic.failures.append(reply)
                case TrainReply():
                    if (one := self._take_in(reply, request)) is not None:
                        yield one
                case ReplyStack() if self.encoding is not None:
                    yield from filter(None, (self._take_in(one, request) for one in reply.replies()))
                case ReplyStack():
                    if len(good := self._take_in_stack(reply, request)):
                        yield good

    def _arrivals(self, request: CohortRequest) -> Iterator[tuple[int, Reply | Failure | None]]:
        """(slot, what stands there); None where a stack of an earlier slot holds the reply.

        Nobody comes late here, so that clients beyond the number wanted are asked only in the place of those that failed.
        """
        reserve = list(enumerate(request.cohort))
        num_wanted = self.num_wanted or len(reserve)
        while reserve and (num := num_wanted - len(self.traffic.accepted)) > 0:
            asked, reserve = dict(reserve[:num]), reserve[num:]
            yield from self._arrivals_of({partition: slot for slot, partition in asked.items()}, request)
        self.traffic.surplus = [partition for _, partition in reserve]

    def _arrivals_of(
        self, waiting: dict[int, int], request: CohortRequest
    ) -> Iterator[tuple[int, Reply | Failure | None]]:
        """Of some clients; `waiting` is their slots."""
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
            if isinstance(result, ReplyStack):
                first, *others = sorted(waiting.pop(partition) for partition in result.partitions)
                yield first, result
                yield from ((slot, None) for slot in others)
            else:
                yield waiting.pop(result.partition), result
        for partition, slot in waiting.items():
            yield slot, Failure(partition=partition, reason="the trainer gave no reply")

    def _take_in(self, reply: TrainReply, request: CohortRequest) -> TrainReply | None:
        """Check a reply and add it to the account, or to the failures; returns it decoded."""
        try:
            check_claims(reply, round=request.round, roles=self._roles)
            sent = reply.tensors
            if self.encoding is not None:
                came = encoded(self.encoding, reply, request.tensors)
                sent, reply = came.tensors, decoded(self.encoding, came, request.tensors)
            check_shapes(reply.tensors, reply.extra, like=request.tensors, is_partial=self.encoding is not None)
            check_numbers(reply, max_examples=self._max_examples)
            whole = {**self._received, **reply.tensors}  # what was not sent is as it was received
            besides = {name: tensor for name, tensor in reply.tensors.items() if name not in self._received}
            check_finite(besides, reply.extra)  # the spread says whether the parameters are
            if not self.traffic.spread.add(whole, self._received):
                check_finite(reply.tensors, {})  # says which
        except ReplyError as error:
            self.traffic.failures.append(failure_of(reply.partition, error))
            return None
        for observer in self.observers:
            observer.add(whole, self._received)
        self._count(reply, sent, [reply.partition], [reply.num_examples], [reply.metrics])
        return reply

    def _take_in_stack(self, stack: ReplyStack, request: CohortRequest) -> ReplyStack:
        """Check the replies of a stack, and add the good ones to the account, the others to the failures."""
        first = {name: tensor[0] for name, tensor in stack.tensors.items()}
        try:
            check_claims(stack, round=request.round, roles=self._roles)
            check_shapes(first, {name: tensor[0] for name, tensor in stack.extra.items()}, like=request.tensors)
        except ReplyError as error:  # of one is of all
            self.traffic.failures += [failure_of(partition, error) for partition in stack.partitions]
            return stack.without(range(len(stack)))
        besides = [tensor for name, tensor in stack.tensors.items() if name not in self._received]
        besides += stack.extra.values()
        numbers = [value for values in stack.metrics.values() for value in values]
        is_bounded = all(
            1 <= num <= self._max_examples(each) for each, num in zip(stack.partitions, stack.num_examples, strict=True)
        ) and all(map(isfinite, numbers))
        if not (
            is_bounded
            and all(is_finite(tensor, LARGEST_VALUE) for tensor in besides)
            and self.traffic.spread.add_stack(stack.tensors, self._received)
        ):
            stack = self._without_diverged(stack)
            if len(stack):
                self.traffic.spread.add_stack(stack.tensors, self._received)
        if len(stack):
            for observer in self.observers:
                observer.add_stack(stack.tensors, self._received)
            each = [{name: values[place] for name, values in stack.metrics.items()} for place in range(len(stack))]
            self._count(stack, stack.tensors, stack.partitions, stack.num_examples, each)
        return stack

    def _without_diverged(self, stack: ReplyStack) -> ReplyStack:
        diverged = []
        for place, reply in enumerate(stack.replies()):
            try:
                check_numbers(reply, max_examples=self._max_examples)
                check_finite(reply.tensors, reply.extra)
            except ReplyError as error:
                self.traffic.failures.append(failure_of(reply.partition, error))
                diverged.append(place)
        return stack.without(diverged)


def check_addresses(partitions: Sequence[int], num_partitions: int) -> None:
    """Raise RoundError unless a strategy addressed different clients that there are."""
    unknown = [partition for partition in partitions if not 0 <= partition < num_partitions]
    twice = [partition for partition, count in Counter(partitions).items() if count > 1]
    if unknown or twice:
        raise RoundError(
            f"the strategy addressed the clients {list(partitions)}; expected are different ones from 0 to "
            f"{num_partitions - 1}: correct its sampling."
        )


def encoded(encoding: UpdateEncoding, reply: TrainReply, received: Tensors) -> TrainReply:
    """What a client sends in place of its reply; raises ReplyError where encoding fails."""
    return _converted(encoding.encode, reply, received)


def decoded(encoding: UpdateEncoding, reply: TrainReply, received: Tensors) -> TrainReply:
    """A reply with the model's tensors in place of what was sent; raises ReplyError where decoding fails."""
    return _converted(encoding.decode, reply, received)


def _converted(convert: Callable[[TrainReply, Tensors], Tensors], reply: TrainReply, received: Tensors) -> TrainReply:
    """Whatever goes wrong is that client's failure alone."""
    try:
        tensors = convert(reply, received)
        if not (isinstance(tensors, dict) and all(isinstance(tensor, Tensor) for tensor in tensors.values())):
            raise TypeError("what it returned is no dict of tensors")
    except ReplyError:
        raise
    except Exception as error:
        reason = failure_of(reply.partition, error).reason
        raise ReplyError(f"{convert.__qualname__} failed: {reason}.") from error
    return replace(reply, tensors=tensors)


def check_claims(reply: Reply, *, round: int, roles: Mapping[str, Role]) -> None:
    """Raise ReplyError unless a reply is for this round and a model of these roles."""
    if reply.round != round:
        raise ReplyError(f"the reply is for round {reply.round}; expected is round {round}.")
    if reply.roles != roles:
        raise ReplyError("the reply names other parameters and buffers than the model has.")


def check_numbers(reply: TrainReply, *, max_examples: MaxExamples) -> None:
    """Raise ReplyError unless a reply counts as many samples as its client may have, and its metrics are finite."""
    num, most = reply.num_examples, max_examples(reply.partition)
    if not num >= 1:  # NaN too
        raise ReplyError(f"the reply counts num-examples={num}; expected is 1 or more.")
    if num > most:
        raise ReplyError(
            f"the reply counts num-examples={num}; expected is {most} at most: for a site that holds more raise "
            "server.max_examples."
        )
    for name, value in reply.metrics.items():
        if not isfinite(value):
            check_finite(reply.tensors, reply.extra)  # which says where it comes from
            raise ReplyError(
                f"the reply's metric '{name}' is {value}; expected is a finite number: its training diverged."
            )


def check_shapes(tensors: Tensors, extra: Tensors, *, like: Tensors, is_partial: bool = False) -> None:
    """Compare what a client sent with the model that it received, or with a part of it.

    Raises:
        ReplyError: other names, shapes or types than the model's; or something besides that is like no parameter.
    """
    missing, unknown = like.keys() - tensors.keys(), tensors.keys() - like.keys()
    if unknown or (missing and not is_partial):
        raise ReplyError(
            f"the reply's tensors are not the model's: missing {sorted(missing)}, unknown {sorted(unknown)}."
        )
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise ReplyError(f"tensor '{name}' is {_kind(tensor)}; expected is {_kind(like[name])}.")
    for name, tensor in extra.items():
        if name not in like or tensor.shape != like[name].shape:
            raise ReplyError(
                f"besides the model came a tensor '{name}' of shape {list(tensor.shape)}; expected are names and "
                "shapes of parameters."
            )


def check_finite(tensors: Tensors, extra: Tensors) -> None:
    """Raise ReplyError for values that are NaN, infinite or so large that squares or sums of them are."""
    for besides, group in (("", tensors), (" besides the model", extra)):
        for name, tensor in group.items():
            if not is_finite(tensor, LARGEST_VALUE):
                held = f"values beyond {LARGEST_VALUE:.1e}" if is_finite(tensor) else "NaN or infinite values"
                raise ReplyError(f"tensor '{name}'{besides} holds {held}: the client's training diverged.")


def bytes_down(cohort: Sequence[int], model: Tensors, shared: Tensors, encoding: UpdateEncoding | None) -> int:
    """What a round's clients download: everything, or what they lack of the model."""
    sizes = {name: tensor.nbytes for name, tensor in model.items()}
    besides = sum(tensor.nbytes for tensor in shared.values())
    if encoding is None:
        return len(cohort) * (sum(sizes.values()) + besides)
    lacking = sum(sizes[name] for partition in cohort for name in encoding.lacking(partition, sizes))
    return lacking + len(cohort) * besides


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
