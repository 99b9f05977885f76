"""A wrapper around any Grid in which node ids are partition indices.

Flower's node ids are random, and every engine delivers replies in a different order.  Behind this grid, a strategy
(ours or Flower's own, unmodified) samples from 0 ... N-1 and receives replies in the order of its messages.  It never
sees a reply that would make it fail: errors, missing or mismatched tensors, NaN and infinite values are recorded as
failures.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from math import inf
from sys import maxsize
from typing import TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedsign.errors import IncompleteModelError, OtherBuildError
from fedsign.federation.aggregation import in_slot_order
from fedsign.federation.codec import digest_of
from fedsign.federation.exchange import Exchange, MaxExamples, Traffic, bytes_down, check_addresses
from fedsign.flower import wire
from fedsign.flower.array import PlainArrays, to_tensors
from fedsign.flower.nodes import NO_HOOKS, NOBODY, Nodes, SiteHooks
from fedsign.flower.pulling import Replies, Requests
from fedsign.flower.reply_checks import GoodReply, checked, read_reply
from fedsign.flower.shims import MessageGrid, ensure_task_identity
from fedsign.records import Failure, Role, Tensors

ReplyT = TypeVar("ReplyT")
Substitutes = Callable[[Sequence[int], int], Sequence[int]]  # (candidates, maximum number) -> clients to ask instead
_TTL_SLACK_S = 60.0
_log = logging.getLogger("fedsign")


class PartitionGrid(MessageGrid, Exchange):
    """A Grid over partitions; see the module docstring.  `leaves_process`: the engine serializes messages.

    With `num_wanted`, a round ends after the first accepted replies.  `substitutes` samples clients that replace absent
    ones.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        num_partitions: int,
        roles: Mapping[str, Role],
        leaves_process: bool = False,
        max_examples: MaxExamples = lambda partition: maxsize,
        hooks: SiteHooks = NO_HOOKS,
    ) -> None:
        Exchange.__init__(self, num_partitions, roles, max_examples)
        ensure_task_identity()
        self._grid = grid
        self.leaves_process = leaves_process
        self._nodes = Nodes(grid, num_partitions=num_partitions, hooks=hooks)
        self._replies = Replies(grid, hooks.watch, is_remote=leaves_process)
        self.substitutes: Substitutes | None = None
        self._shown: Sequence[int] = range(num_partitions)
        self._has_warned = False
        self._frozen = [name for name, role in roles.items() if role is Role.FROZEN]
        self._frozen_digests: dict[str, str] = {}
        self._other_builds: set[int] = set()  # partitions whose nodes build other frozen tensors
        self._ttl_s = inf  # lifetime of undelivered messages: a node that reconnects must not find those of past rounds

    def set_run(self, run: Run) -> None:
        """Forwarded to the wrapped grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run's information."""
        return self._grid.run

    def get_node_ids(self) -> Iterable[int]:
        """All partitions in order, or the subset passed to `showing`."""
        return self._shown

    @contextmanager
    def showing(self, partitions: Sequence[int]) -> Iterator[None]:
        """Show only these partitions, so a foreign strategy samples among them."""
        self._shown = partitions
        try:
            yield
        finally:
            self._shown = range(self._num_partitions)

    def roll_call(
        self, *, timeout_s: float, question: Mapping[str, str] | None = None, at_least: int | None = None
    ) -> None:
        """Find the node of each partition; see `Nodes.roll_call`."""
        self._nodes.roll_call(timeout_s=timeout_s, question=question or {}, at_least=at_least)

    def shut_down(self, *, timeout_s: float) -> None:
        """Tell the nodes that the run is over; see `Nodes.shut_down`."""
        self._nodes.shut_down(timeout_s=timeout_s)

    @property
    def answers(self) -> Mapping[int, ConfigRecord]:
        """The answers to the roll call, by partition."""
        return self._nodes.answers

    @property
    def remarks(self) -> Mapping[int, str]:
        """The remarks on these answers, by partition."""
        return self._nodes.remarks

    def _turn_to(self, partitions: Sequence[int], *, timeout_s: float) -> list[int]:
        """Prepare for messages to these partitions: update their nodes, set message lifetimes, report late replies.

        Returns partitions without a node.
        """
        self._ttl_s = timeout_s + _TTL_SLACK_S
        absent = self._nodes.refresh(partitions)
        if self.leaves_process:
            for requests, partition in self._replies.late():
                why = (
                    f"its reply to '{requests.kind}' of round {requests.round} came when the round was over, "
                    "and does not count"
                )
                self._nodes.tell_of(partition, "late", why)
        return absent

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages addressed to partitions; returns None in place of an id for messages that were not sent."""
        plain = PlainArrays() if self.leaves_process else None
        batch = [self._outgoing(message, plain) for message in messages]
        # a list, since HttpGrid iterates over it twice
        sent = [message for message in batch if message.metadata.dst_node_id != NOBODY]
        ids = iter([*self._grid.push_messages(sent)] if sent else ())
        is_sent = [message.metadata.dst_node_id != NOBODY for message in batch]
        return [cast(str, (next(ids, None) or None) if each else None) for each in is_sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies as they arrive, unchecked; their sources are partitions."""
        return self._grid.pull_messages(list(message_ids))

    def ask(
        self,
        messages: Iterable[Message],
        requests: Requests,
        checks: Sequence[Callable[[Message], ReplyT]],
        *,
        timeout_s: float,
    ) -> Iterator[ReplyT | Failure]:
        """The checked reply to each message, or its failure, in order."""
        self._turn_to(requests.partitions, timeout_s=timeout_s)
        pushed = list(self.push_messages(messages))
        replies = self._replies.arrivals(pushed, requests, deadline=time.monotonic() + timeout_s)
        yield from in_slot_order(
            (slot, read_reply(reply, partition, checks[slot], self.label))
            for slot, reply in replies
            for partition in [requests.partitions[slot]]
        )

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send all messages; yield accepted replies in the order of the messages, as early as possible."""
        batch = list(messages)
        drawn = [message.metadata.dst_node_id for message in batch]
        check_addresses(drawn, self._num_partitions)
        absent = self._turn_to(drawn, timeout_s=inf if timeout is None else timeout)
        if absent and self.substitutes is not None:
            batch = self._with_substitutes(batch, drawn, self.substitutes, num=len(absent))
        self.traffic = Traffic(sent=[message.metadata.dst_node_id for message in batch])
        message_ids = list(self.push_messages(batch))
        deadline = time.monotonic() + timeout if timeout is not None else inf
        return self._good_replies(batch, message_ids, deadline)

    def _with_substitutes(
        self, batch: list[Message], drawn: Sequence[int], substitutes: Substitutes, *, num: int
    ) -> list[Message]:
        """The batch extended by messages to substitutes, sorted by partition."""
        gone, first = {*drawn, *self._nodes.absent(range(self._num_partitions))}, batch[0]
        spare = [partition for partition in range(self._num_partitions) if partition not in gone]
        more = [Message(first.content, partition, first.metadata.message_type) for partition in substitutes(spare, num)]
        return sorted([*batch, *more], key=lambda message: message.metadata.dst_node_id)

    def _good_replies(self, batch: list[Message], message_ids: list[str], deadline: float) -> Iterator[Message]:
        for request, reply in zip(batch, in_slot_order(self._arrivals(batch, message_ids, deadline)), strict=True):
            if reply is None:
                self.traffic.surplus.append(request.metadata.dst_node_id)
            elif isinstance(reply, Failure):
                self.traffic.failures.append(reply)
            else:
                self._account(reply, request)
                yield reply.message

    def _arrivals(
        self, batch: list[Message], message_ids: list[str], deadline: float
    ) -> Iterator[tuple[int, GoodReply | Failure | None]]:
        """(slot, reply or failure) in order of arrival, every slot once.  None: the reply is no longer needed."""
        num_wanted, num_good = self.num_wanted or len(batch), 0
        left = dict.fromkeys(range(len(batch)))
        leaves_out = self.encoding is not None or self._frozen
        resend = partial(self._resend, batch, set[int]()) if leaves_out else None
        requests = Requests("train", wire.round_of(batch[0]), self.traffic.sent)
        # closed at once on `break`, so that outstanding replies become overdue now, not at garbage collection
        with closing(self._replies.arrivals(message_ids, requests, deadline=deadline, resend=resend)) as arrivals:
            for slot, reply in arrivals:
                check = partial(
                    checked,
                    request=batch[slot],
                    roles=self._roles,
                    max_examples=self.most_examples,
                    encoding=self.encoding,
                )
                partition = requests.partitions[slot]
                outcome = read_reply(reply, partition, check, self.label)
                del left[slot]
                num_good += isinstance(outcome, GoodReply)
                yield slot, outcome
                if num_good == num_wanted:
                    break
        yield from ((slot, None) for slot in left)

    def label(self, partition: int) -> str:
        """Prefix of sentences about a client: its site, if sites are registered."""
        site = self._nodes.site(partition)
        return "" if site is None else f"site {site.name}: "

    def most_examples(self, partition: int) -> int:
        """Limit on a reply's num_examples: the registered site's, otherwise the experiment's."""
        site = self._nodes.site(partition)
        return site.max_examples if site is not None and site.max_examples else self._max_examples(partition)

    def _resend(self, batch: list[Message], before: set[int], slot: int, reply: Message) -> str | None:
        """Resend a request with the whole model if the client lacked tensors; `before`: slots already resent."""
        kind = (reply.error.reason or "").partition(":")[0] if reply.has_error() else ""
        if slot in before or kind not in (IncompleteModelError.__name__, OtherBuildError.__name__):
            return None
        if kind == OtherBuildError.__name__:
            self._other_builds.add(batch[slot].metadata.dst_node_id)  # is sent them at once from the next round on
        before.add(slot)
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s (Said once; bytes_down counts what a client lacks by its replies.)",
                (reply.error.reason or "").partition("\n")[0],
            )
        # not counted again in bytes_down, which follows from the ledger, the same on every engine
        second = self._outgoing(batch[slot], PlainArrays(), whole=True)
        return next(iter(self._grid.push_messages([second])), None) or None

    def _outgoing(self, message: Message, plain: PlainArrays | None, *, whole: bool = False) -> Message:
        """A message to the partition's node; arrays shared by messages are serialized once.

        `whole`: resend with the whole model.
        """
        metadata, content = message.metadata, message.content
        partition, trains = metadata.dst_node_id, metadata.message_type == MessageType.TRAIN
        encodings: dict[str, str] = {}
        digests: dict[str, str] = {}
        # before the version is read below: a site that takes over a client has none of its state
        if (site := self._nodes.site(partition)) is not None:
            self.ledger.hand_over(partition, site.name)
        if trains and not whole:
            model, shared = to_tensors(wire.arrays_of(content)), to_tensors(wire.auxiliary(content))
            sent = {name: tensor for name, tensor in model.items() if name not in self._built_by(partition)}
            self.traffic.bytes_down += bytes_down([partition], sent, shared, self.encoding)
        if plain is not None:
            content = RecordDict(dict(content))
            for key, record in wire.of_kind(content, ArrayRecord).items():
                names = None
                if trains and key != wire.AUXILIARY and (self.encoding is not None or self._frozen):
                    digests = self._digests(to_tensors(record))
                    lacking = [*record] if self.encoding is None else self.encoding.lacking(partition, record)
                    names = None if whole else [name for name in lacking if name not in self._built_by(partition)]
                content[key], own = plain.of(record, names)
                encodings = encodings | own
        routed = wire.route(
            content,
            partition=partition,
            state_version=self.ledger.versions.get(partition, 0),
            needed_versions=self.ledger.needed(partition),
            encodings=encodings,
            digests=digests,
        )
        return Message(
            routed,
            self._nodes.of(partition),
            metadata.message_type,
            ttl=min(metadata.ttl, self._ttl_s),
            group_id=metadata.group_id,
        )

    def _built_by(self, partition: int) -> Sequence[str]:
        """The tensors that a partition's node has in its own build, as far as is known."""
        return () if partition in self._other_builds else self._frozen

    def _digests(self, model: Tensors) -> dict[str, str]:
        """The digests of all tensors that requests may leave out."""
        if not self._frozen_digests:
            self._frozen_digests = {name: digest_of(model[name]) for name in self._frozen}
        found = {} if self.encoding is None else self.encoding.digests(model)
        return {**self._frozen_digests, **found}

    def _account(self, good: GoodReply, request: Message) -> None:
        served, reply = to_tensors(wire.arrays_of(request.content)), good.reply
        received = {name: served[name] for name in self._parameters}
        whole = {**received, **reply.tensors}  # tensors not sent are unchanged
        self.traffic.dispersion.add(whole, received)
        for observer in self.observers:
            observer.add(whole, received)
        self._count(reply, served, good.sent, [reply.partition], [reply.num_examples], [reply.metrics])
