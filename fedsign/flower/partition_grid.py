"""A wrapper around any Grid in which a node id is a partition index.

Flower's node ids are random, and every engine delivers replies in another order.  Seen through this
grid, a strategy (ours or Flower's own, unmodified) samples from 0 ... N-1, gets replies in the order of
its messages, and never sees one that would make it fail: errors, missing or wrong tensors, NaN and
infinite values are taken out and written down as failures.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, prod
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedsign.aggregation import in_slot_order
from fedsign.analysis.agreement import SignAgreement
from fedsign.errors import FedSignError, ReplyError
from fedsign.exchange import ClientLedger, Traffic, check_addresses, check_finite, check_shapes
from fedsign.flower import wire
from fedsign.flower.array import to_plain, to_tensors
from fedsign.flower.nodes import Nodes
from fedsign.flower.pulling import arrivals
from fedsign.flower.shims import MessageGrid, ensure_task_identity, set_source
from fedsign.records import Failure, Role, TrainReply, failure_of

_TTL_SLACK_S = 60.0


class PartitionGrid(MessageGrid):
    """See the module.  `leaves_process`: messages are serialised by the engine underneath.

    `roles` are the model's, which every reply has to confirm; `traffic` tells of the last round.  With `num_wanted` a round
    ends with so many good replies, the first that come.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        num_partitions: int,
        roles: Mapping[str, Role],
        ledger: ClientLedger | None = None,
        leaves_process: bool = False,
    ) -> None:
        ensure_task_identity()
        self._grid = grid
        self._num_partitions = num_partitions
        self._roles = {name: str(role) for name, role in roles.items()}
        self._leaves_process = leaves_process
        self._nodes = Nodes(grid, num_partitions=num_partitions)
        self._shown: Sequence[int] = range(num_partitions)
        self.ledger = ledger or ClientLedger()
        self.traffic = Traffic()
        self.watches_signs = False
        self.num_wanted: int | None = None
        self._ttl_s = inf  # of a message that no node has pulled; a node that comes back finds no round that is over

    def set_run(self, run: Run) -> None:
        """Pass on."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run's information."""
        return self._grid.run

    def get_node_ids(self) -> Iterable[int]:
        """All partitions, in order, or those that are being shown."""
        return self._shown

    @contextmanager
    def showing(self, partitions: Sequence[int]) -> Iterator[None]:
        """Show only these partitions, so that a foreign strategy samples among them."""
        self._shown = partitions
        try:
            yield
        finally:
            self._shown = range(self._num_partitions)

    def roll_call(self, *, timeout_s: float) -> None:
        """Find out which node serves which partition; see Nodes."""
        self._nodes.roll_call(timeout_s=timeout_s)

    @property
    def counts(self) -> dict[int, list[int]]:
        """Of labels, of the sites that told them at the roll call."""
        return self._nodes.counts

    def turn_to(self, partitions: Iterable[int], *, timeout_s: float) -> None:
        """Before messages are sent to these partitions: who serves them now, and how long an answer is waited for."""
        self._ttl_s = timeout_s + _TTL_SLACK_S
        self._nodes.refresh(partitions)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages that are addressed to partitions."""
        plain: dict[int, tuple[ArrayRecord, ArrayRecord, dict[str, str]]] = {}
        batch = [self._outgoing(message, plain) for message in messages]  # a list: HTTP walks it twice
        return list(self._grid.push_messages(batch))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies as they come, unchecked, from partitions."""
        return self._grid.pull_messages(list(message_ids))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send now; yield the good replies in the order of the messages, as soon as that can be."""
        batch = list(messages)
        signs = SignAgreement() if self.watches_signs else None
        self.traffic = Traffic(sent=[message.metadata.dst_node_id for message in batch], signs=signs)
        check_addresses(self.traffic.sent, self._num_partitions)
        self.turn_to(self.traffic.sent, timeout_s=inf if timeout is None else timeout)
        message_ids = list(self.push_messages(batch))
        deadline = time.monotonic() + timeout if timeout is not None else inf
        return self._good_replies(batch, message_ids, deadline)

    def _good_replies(self, batch: list[Message], message_ids: list[str], deadline: float) -> Iterator[Message]:
        for request, reply in zip(batch, in_slot_order(self._arrivals(batch, message_ids, deadline)), strict=True):
            if reply is None:
                self.traffic.surplus.append(request.metadata.dst_node_id)
            elif isinstance(reply, Failure):
                self.traffic.failures.append(reply)
            else:
                self._account(reply, request)
                yield reply

    def _arrivals(
        self, batch: list[Message], message_ids: list[str], deadline: float
    ) -> Iterator[tuple[int, Message | Failure | None]]:
        """(slot, reply or failure), in order of arrival; every slot once.  None: it is not waited for any more."""
        trains = bool(batch) and batch[0].metadata.message_type == MessageType.TRAIN
        num_wanted, num_good = (self.num_wanted if trains else None) or len(batch), 0
        left = dict.fromkeys(range(len(batch)))
        for slot, came in arrivals(self._grid, message_ids, len(batch), deadline=deadline):
            outcome = _failure(batch[slot], came) if isinstance(came, str) else self._checked(came, batch[slot])
            del left[slot]
            num_good += isinstance(outcome, Message)
            yield slot, outcome
            if num_good == num_wanted:
                break
        yield from ((slot, None) for slot in left)

    def _outgoing(self, message: Message, plain: dict[int, tuple[ArrayRecord, ArrayRecord, dict[str, str]]]) -> Message:
        """The message for the node that serves the partition; arrays shared by messages are converted once."""
        metadata, content = message.metadata, message.content
        partition = metadata.dst_node_id
        encodings: dict[str, str] = {}
        if metadata.message_type == MessageType.TRAIN:
            self.traffic.bytes_down += _nbytes_of(content)
        if self._leaves_process:
            content = RecordDict(dict(content))
            for key, record in wire.of_kind(content, ArrayRecord).items():
                if id(record) not in plain:  # the record is kept too, so that its id stays its own
                    plain[id(record)] = (record, *to_plain(record))
                _, content[key], own = plain[id(record)]
                encodings = encodings | own
        routed = wire.route(
            content,
            partition=partition,
            state_version=self.ledger.versions.get(partition, 0),
            needed_versions=self.ledger.needed(partition),
            encodings=encodings,
        )
        return Message(
            routed,
            self._nodes.of(partition),
            metadata.message_type,
            ttl=min(metadata.ttl, self._ttl_s),
            group_id=metadata.group_id,
        )

    def _checked(self, reply: Message, request: Message) -> Message | Failure:
        """The reply, addressed from its partition, or why it cannot be used."""
        if reply.has_error():
            reason, _, details = (reply.error.reason or "the node gave no reason").partition("\n")
            return _failure(request, reason, details)
        set_source(reply, request.metadata.dst_node_id)
        if request.metadata.message_type == MessageType.TRAIN:
            try:
                self._check_train_reply(reply, request)
            except FedSignError as error:
                return _failure(request, str(error))
            except Exception as error:  # noqa: BLE001 - whatever a node sends is that node's failure alone
                return _failure(request, f"the reply cannot be read: {failure_of(0, error).reason}.")
        return reply

    def _check_train_reply(self, reply: Message, request: Message) -> None:
        """Decode the reply's tensors, once, and compare them with the model's."""
        self._check_num_examples(reply)
        wire.decode(reply)
        if wire.REPLY in wire.of_kind(reply.content, ConfigRecord):
            self._check_own_reply(wire.unpack_reply(reply), request)
        tensors, extra = to_tensors(wire.arrays_of(reply.content)), to_tensors(wire.besides(reply.content))
        check_shapes(tensors, extra, like=to_tensors(wire.arrays_of(request.content)))
        check_finite(tensors, extra)

    def _check_own_reply(self, reply: TrainReply, request: Message) -> None:
        expected = (wire.round_of(request), request.metadata.dst_node_id)
        if (reply.round, reply.partition) != expected:
            raise ReplyError(
                f"the reply is for round {reply.round}, partition {reply.partition}; expected were round {expected[0]}, "
                f"partition {expected[1]}."
            )
        if {name: str(role) for name, role in reply.roles.items()} != self._roles:
            raise ReplyError("the reply names other parameters and buffers than the model has.")

    def _check_num_examples(self, reply: Message) -> None:
        metrics = next(iter(wire.of_kind(reply.content, MetricRecord).values()), None)
        if metrics is None:
            raise ReplyError("the reply holds no metric record; expected is one, with 'num-examples' in it.")
        num_examples = cast(float, metrics.get(wire.NUM_EXAMPLES_KEY, 1))
        if not 1 <= num_examples < float("inf"):  # NaN too
            raise ReplyError(f"the reply counts num-examples={num_examples}; expected is 1 or more.")

    def _account(self, reply: Message, request: Message) -> None:
        if reply.metadata.message_type != MessageType.TRAIN:
            return
        self.traffic.accepted.append(reply.metadata.src_node_id)
        record = wire.of_kind(reply.content, ConfigRecord).get(wire.REPLY)
        if record is not None and record.get("has-state"):
            self.traffic.with_state.append(reply.metadata.src_node_id)
        self.traffic.bytes_up += _nbytes_of(reply.content)
        before, after = to_tensors(wire.arrays_of(request.content)), to_tensors(wire.arrays_of(reply.content))
        parameters = {name: before[name] for name, role in self._roles.items() if role == Role.PARAMETER}
        self.traffic.spread.add(after, parameters)
        if self.traffic.signs is not None:
            self.traffic.signs.add(after, parameters)
        metrics = next(iter(wire.of_kind(reply.content, MetricRecord).values()))
        num_examples, loss = metrics.get(wire.NUM_EXAMPLES_KEY), metrics.get("train-loss")
        if isinstance(num_examples, int | float) and isinstance(loss, int | float):
            self.traffic.weighted_losses.append((int(num_examples), float(loss)))


def _failure(request: Message, reason: str, details: str = "") -> Failure:
    return Failure(partition=request.metadata.dst_node_id, reason=reason, details=details)


def _nbytes_of(content: RecordDict) -> int:
    return sum(_nbytes(array) for record in wire.of_kind(content, ArrayRecord).values() for array in record.values())


def _nbytes(array: Array) -> int:
    itemsize = 2 if array.dtype == "bfloat16" else np.dtype(array.dtype).itemsize
    return prod(array.shape) * itemsize
