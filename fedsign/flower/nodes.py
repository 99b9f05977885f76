"""Which node serves which partition: a roll call at the start, and an update before each batch of messages.

Flower's node ids are random.  A SuperNode that reconnects may have a new id, and a crashed one counts as online until
its heartbeats have been missing for a while.

[Note: who speaks for whom] If the operator registers sites with their keys, `members` maps nodes to sites by key.  A
site speaks for its own partition only, whatever its node claims; other claims are refused and logged.

[Note: who is absent] The roll call waits for all partitions.  If it times out with enough of them, the others are
absent: they get no messages until they join.  Revoked sites are not waited for.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import cast

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedsign.errors import EngineError
from fedsign.flower import wire
from fedsign.flower.pulling import Replies, Requests, Watch, pauses
from fedsign.records import printable

_REJOIN_S = 15.0  # wait for the answer of a new node that may replace a lost one
_ASKS_AGAIN_S = 60.0
_NAMED_AFTER_S = 5.0
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, slots=True)
class Member:
    """A registered site with its node id; None if no node with its key is online, or the site is revoked."""

    name: str
    partition: int
    node_id: int | None
    is_active: bool = True
    max_examples: int = 0  # limit on num_examples of its replies; 0: the experiment's


Members = Callable[[], Sequence[Member]]
Note = Callable[[Mapping[str, str]], None]
# Judges an answer to the roll call: the reason to refuse the node, and a remark on it.
Judge = Callable[[ConfigRecord], tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteHooks:
    """What the operator knows about sites (`members`; None: nodes are not authenticated), and how it is notified."""

    members: Members | None = None
    judge: Judge = lambda answer: ("", "")
    note: Note = lambda event: None  # a site joined, left, was late or was refused
    watch: Watch = lambda requests, waiting: None


NO_HOOKS = SiteHooks()
NOBODY = -1  # node id of a partition without a node
# errors that mean that a message was lost in transit
_LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


class Nodes:
    """The nodes of a grid.  `answers` and `remarks` (by partition): answers to the roll call, and remarks on them."""

    def __init__(self, grid: Grid, *, num_partitions: int, hooks: SiteHooks = NO_HOOKS) -> None:
        self._grid, self._num_partitions = grid, num_partitions
        self._members, self._note, self._judge = hooks.members, hooks.note, hooks.judge
        self._site_of: dict[int, Member] = {}  # by node id, if sites are registered
        self._site: dict[int, Member] = {}  # by partition
        self._revoked: set[str] = set()
        self._known_revoked: set[str] = set()
        self._served_by: dict[int, str] = {}  # partition with a node online -> its site, "" if sites have no keys
        self._node_of: dict[int, int] | None = None  # None: node ids are partitions
        self._asked_at: dict[int, float] = {}  # node id -> time
        self._waiting: dict[str, int] = {}  # message id -> node id
        self._last_reply_at = 0.0
        self._question: Mapping[str, str] = {}
        self.answers: dict[int, ConfigRecord] = {}
        self.remarks: dict[int, str] = {}

    def of(self, partition: int) -> int:
        """The node that serves a partition, or NOBODY."""
        return partition if self._node_of is None else self._node_of.get(partition, NOBODY)

    def site(self, partition: int) -> Member | None:
        """The site of a partition, if sites are registered."""
        return self._site.get(partition)

    def absent(self, partitions: Iterable[int]) -> list[int]:
        """Those partitions that had no node at the last update."""
        return [partition for partition in partitions if partition not in self._served_by]

    def roll_call(self, *, timeout_s: float, question: Mapping[str, str], at_least: int | None = None) -> None:
        """Ask all nodes which partitions they serve, until each partition has a node; `question` is sent along.

        `at_least`: number of partitions that suffice on timeout (None: all); see [Note: who is absent].

        Raises:
            EngineError: too few partitions have a node in time, two nodes claim the same one, or a node is refused.
        """
        self._question = question
        claimed: dict[int, int] = {}
        refused: set[int] = set()
        began_at, is_reported = time.monotonic(), False
        for _ in pauses():
            online = self._online()
            self._ask(online)
            if self._members is not None:  # a revoked or lost node frees its partition for another
                claimed = {partition: node_id for partition, node_id in claimed.items() if node_id in online}
            for node_id, partitions, refusal in self._answers():
                if refusal and node_id not in self._site_of:  # only registered sites can be left out one by one
                    raise EngineError(f"a node cannot take part: {refusal}")
                if refusal:
                    refused.add(self._site_of[node_id].partition)
                    self._tell([self._name(node_id)], "refused", refusal)
                for partition in partitions:
                    if claimed.setdefault(partition, node_id) != node_id:
                        raise EngineError(
                            f"two nodes claim partition {partition}: give every node its own partition-id in "
                            "--node-config."
                        )
            missing = [partition for partition in range(self._num_partitions) if partition not in claimed]
            awaited = [partition for partition in missing if self._is_active(partition) and partition not in refused]
            if not awaited or time.monotonic() > began_at + timeout_s:
                break
            if not is_reported and time.monotonic() > began_at + _NAMED_AFTER_S:
                is_reported = True
                why = f"no answer yet; waiting for up to {timeout_s:g} s"
                self._tell(self._names(awaited), "awaited", why)
        if self._num_partitions - len(missing) < (at_least or self._num_partitions):
            silent = len({*self._waiting.values()})
            unheard = f"; online without an answer: {silent}" if silent else ""
            enough = f"server.min_replies={at_least}" if at_least else "partition.num_clients"
            raise EngineError(
                f"{len(missing)} of {self._num_partitions} partitions have no node after {timeout_s:g} s (first: "
                f"{', '.join(self._names(missing[:5]))}{unheard}); start their nodes, or lower {enough}."
            )
        self._node_of = {partition: node for partition, node in claimed.items() if partition < self._num_partitions}
        self._served_by = {partition: self._site_name(partition) for partition in self._node_of}
        revoked = [partition for partition in missing if not self._is_active(partition)]
        absent = [partition for partition in missing if partition not in revoked]
        self._tell(self._names(revoked), "revoked", "the run continues without it")
        self._tell(self._names(absent), "absent", "the run continues without it until it connects")
        self._known_revoked = self._revoked

    def refresh(self, wanted: Sequence[int]) -> list[int]:
        """Update the nodes before messages to the `wanted` partitions; returns those that have no node.

        A new node may replace one that is gone.  Only in that case, and only once, is its answer waited for.
        """
        if self._node_of is None:
            return []
        online, began_at = self._online(), time.monotonic()
        self._ask(online)
        for _ in pauses():
            for node_id, partitions, refusal in self._answers():
                if refusal:
                    _log.warning("a node that connected cannot take part: %s", refusal)
                    self._tell([self._name(node_id)], "refused", refusal)
                for partition in partitions:
                    self._hand_over(partition, node_id, online)
            has_gone = any(self.of(partition) not in online for partition in wanted)
            has_come = any(self._asked_at.get(node_id, -inf) >= began_at for node_id in self._waiting.values())
            if not (has_gone and has_come) or time.monotonic() > began_at + _REJOIN_S:
                break
        self._note_changes(online)
        return self.absent(wanted) if any(self.of(partition) not in online for partition in wanted) else []

    def shut_down(self, *, timeout_s: float) -> None:
        """Tell all nodes that serve a partition that the run is over; do not wait for answers beyond the timeout."""
        nodes = sorted({*(self._node_of or {}).values()} & self._online())
        pushed = self._push(nodes, wire.SHUTDOWN, {})
        replies = Replies(self._grid).arrivals(
            pushed, Requests("shut down", 0, nodes), deadline=time.monotonic() + timeout_s
        )
        for _ in replies:
            pass  # an answer only confirms delivery

    def _online(self) -> set[int]:
        """Nodes that are online; if sites are registered, only theirs."""
        if self._members is None:
            return set(self._grid.get_node_ids())
        members = sorted(self._members(), key=attrgetter("is_active"))  # last wins: a partition's active site
        self._site = {site.partition: site for site in members}
        self._site_of = {site.node_id: site for site in members if site.node_id is not None}
        self._revoked = {site.name for site in members if not site.is_active and site.partition < self._num_partitions}
        return set(self._site_of)

    def tell_of(self, partition: int, event: str, why: str) -> None:
        """Report an event about the site of a partition."""
        self._tell(self._names([partition]), event, why)

    def _tell(self, names: Iterable[str], event: str, why: str) -> None:
        for name in names:
            self._note({"site": name, "event": event, "why": why})

    def _name(self, node_id: int) -> str:
        return self._site_of[node_id].name if node_id in self._site_of else "a node"

    def _site_name(self, partition: int) -> str:
        return self._site[partition].name if partition in self._site else ""

    def _names(self, partitions: Sequence[int]) -> list[str]:
        """The names of sites, or a single text for all partitions if sites have no names."""
        return _or_numbers([self._site_name(partition) for partition in partitions], partitions)

    def _is_active(self, partition: int) -> bool:
        return partition not in self._site or self._site[partition].is_active

    def _note_changes(self, online: set[int]) -> None:
        """Report which sites joined, left or were revoked since the last update."""
        self._tell(sorted(self._revoked - self._known_revoked), "revoked", "the run continues without it")
        self._known_revoked = self._revoked
        before, table = self._served_by, self._node_of or {}
        now = {partition: self._site_name(partition) for partition, node in table.items() if node in online}
        self._served_by = now
        gone = [partition for partition in sorted(before) if now.get(partition) != before[partition]]
        come = [partition for partition in sorted(now) if before.get(partition) != now[partition]]
        left = _or_numbers([before[partition] for partition in gone], gone)
        self._tell([name for name in left if name not in self._revoked], "left", "its SuperNode is not online")
        self._tell(self._names(come), "joined", "it takes part from this round on")

    def _own(self, node_id: int, claimed: Sequence[int]) -> list[int]:
        """The partitions that a node may speak for, by [Note: who speaks for whom]."""
        if self._members is None:
            return [*claimed]
        site = self._site_of.get(node_id)
        if site is None:  # revoked before it answered
            return []
        foreign = [partition for partition in claimed if partition != site.partition]
        if foreign:
            why = f"it claims to be {foreign[:5]}, but its key is registered for partition {site.partition}"
            self._tell([site.name], "refused", why)
        return [site.partition] if site.partition in claimed else []

    def _push(self, node_ids: Iterable[int], kind: str, entries: Mapping[str, str]) -> list[str | None]:
        """Send a message to each node; returns message ids."""
        content = RecordDict({wire.CONFIG: ConfigRecord({**entries})})
        return list(self._grid.push_messages([Message(content, node_id, kind) for node_id in node_ids]))

    def _hand_over(self, partition: int, node_id: int, online: set[int]) -> None:
        """Assign a partition to a new node, unless its current node is still online."""
        table = self._node_of
        if table is None or table.get(partition) == node_id:
            return
        if partition not in range(self._num_partitions):
            _log.warning("a node that has come serves partition %d, which is not asked for", partition)
        elif table.get(partition) in online:
            _log.warning(
                "a node that has come claims partition %d, which another one serves: it gets no work", partition
            )
        else:
            table[partition] = node_id

    def _ask(self, node_ids: Collection[int]) -> None:
        """Send the roll call to nodes that were not asked yet."""
        now = time.monotonic()
        # a node that went offline is asked again when it returns
        self._asked_at = {node_id: when for node_id, when in self._asked_at.items() if node_id in node_ids}
        for node_id in {*self._waiting.values()} & self._asked_at.keys():
            # Flower loses messages when a host is very busy.  While other nodes still answer, this one's turn may just
            # not have come.  The answer to either message counts.
            if now - max(self._asked_at[node_id], self._last_reply_at) > _ASKS_AGAIN_S:
                del self._asked_at[node_id]
        new = sorted(set(node_ids) - self._asked_at.keys())
        if not new:
            return
        self._asked_at |= dict.fromkeys(new, now)
        sent = self._push(new, wire.ROLL_CALL, self._question)
        for message_id, node_id in zip(sent, new, strict=True):
            if message_id:
                self._waiting[message_id] = node_id
            else:
                self._asked_at.pop(node_id, None)  # offline again

    def _answers(self) -> Iterator[tuple[int, list[int], str]]:
        """Pull the available answers: (node id, partitions, refusal)."""
        for reply in self._grid.pull_messages(list(self._waiting)) if self._waiting else ():
            if reply.metadata.reply_to_message_id not in self._waiting:
                continue  # answers a message of another run or an earlier one
            node_id, self._last_reply_at = self._waiting[reply.metadata.reply_to_message_id], time.monotonic()
            # also drops a second question to the same node, since one answer suffices
            self._waiting = {question: other for question, other in self._waiting.items() if other != node_id}
            if reply.has_error() and reply.error.code in _LOST:
                self._asked_at.pop(node_id, None)  # to be asked again when it is online
                continue
            if reply.has_error():
                yield node_id, [], printable((reply.error.reason or "it gave no reason").partition("\n")[0])
                continue
            record = wire.of_kind(reply.content, ConfigRecord).get(wire.REPLY, ConfigRecord())
            claimed = record.get("partitions")
            if not (isinstance(claimed, list) and all(isinstance(each, int) for each in claimed)):
                yield node_id, [], "its answer to the roll call names no partitions; start it with FedSign's ClientApp."
                continue
            refusal, remark = self._judge(record)
            if remark:
                self._tell([self._name(node_id)], "remark", remark)
            if refusal:
                yield node_id, [], refusal
                continue
            partitions = self._own(node_id, cast("list[int]", claimed))
            self.answers |= dict.fromkeys(partitions, record)
            self.remarks |= dict.fromkeys(partitions, remark)
            yield node_id, partitions, ""


def _or_numbers(names: Sequence[str], partitions: Sequence[int]) -> list[str]:
    """Names of sites; a single text with the partitions if sites are not registered."""
    return [name for name in names if name] or ([str([*partitions])] if partitions else [])
