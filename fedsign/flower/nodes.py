"""Which node serves which partition: a roll call at the start, and a look at who has come and gone before each sending.

Flower's node ids are random.  A SuperNode that comes back may have another one than before, and one that is struck down is
known to be gone only when its heartbeats have been missing for a while.

[Note: who speaks for whom] Where the operator registers sites with their keys, `members` says which node has which site's key: a site
speaks for its own partition, whatever its node claims.  A claim beyond that is refused and noted.

[Note: who is absent] The roll call waits for all; with enough of them at its end, the others are absent: messages to them are not
sent, and they are taken in when they come.  A site that is revoked is not waited for.
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
from fedsign.flower.pulling import Asked, Replies, Watch, pauses
from fedsign.records import printable

_REJOIN_S = 15.0  # to be waited for when somebody has gone and somebody else has come
_ASKS_AGAIN_S = 60.0
_NAMED_AFTER_S = 5.0
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, slots=True)
class Member:
    """A site as the operator registered it, and the node that has its key, if that is online; none if the site is revoked."""

    name: str
    partition: int
    node_id: int | None
    is_active: bool = True
    max_examples: int = 0  # that its replies may count; 0: as the experiment says


Members = Callable[[], Sequence[Member]]
Note = Callable[[Mapping[str, str]], None]
# Of an answer to the roll call: why its node is refused, and a remark on it.
Judge = Callable[[ConfigRecord], tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteHooks:
    """What the operator of a federation knows of its sites (`members`, None: none shows who it is), and hears of them."""

    members: Members | None = None
    judge: Judge = lambda answer: ("", "")
    note: Note = lambda event: None  # who comes, goes, is late and is refused
    watch: Watch = lambda asked, waiting: None


NO_HOOKS = SiteHooks()
NOBODY = -1  # in place of a node's id
_LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)  # on the way


class Nodes:
    """The nodes of a grid.  `answers`, `remarks`: what the node of a partition said at the roll call, and what was judged of it."""

    def __init__(self, grid: Grid, *, num_partitions: int, hooks: SiteHooks = NO_HOOKS) -> None:
        self._grid, self._num_partitions = grid, num_partitions
        self._members, self._note, self._judge = hooks.members, hooks.note, hooks.judge
        self._site_of: dict[int, Member] = {}  # by node id, where sites are registered
        self._site: dict[int, Member] = {}  # by partition
        self._revoked: set[str] = set()
        self._known_revoked: set[str] = set()
        self._served_by: dict[int, str] = {}  # partition -> site whose node is online, "" where sites have no keys
        self._node_of: dict[int, int] | None = None  # None: a node id is a partition
        self._asked: dict[int, float] = {}  # node id -> when
        self._waiting: dict[str, int] = {}  # message id -> node id
        self._heard_at = 0.0
        self._question: Mapping[str, str] = {}
        self.answers: dict[int, ConfigRecord] = {}
        self.remarks: dict[int, str] = {}

    def of(self, partition: int) -> int:
        """The node that serves a partition, or NOBODY."""
        return partition if self._node_of is None else self._node_of.get(partition, NOBODY)

    def site(self, partition: int) -> Member | None:
        """The site of a partition, where sites are registered."""
        return self._site.get(partition)

    def absent(self, partitions: Iterable[int]) -> list[int]:
        """Those of them that no node served at the last look."""
        return [partition for partition in partitions if partition not in self._served_by]

    def roll_call(self, *, timeout_s: float, question: Mapping[str, str], at_least: int | None = None) -> None:
        """Ask every node which partitions it serves, until each partition has a node; `question`: what else it is asked.

        `at_least`: so many partitions are enough when the time is over, None: all; see [Note: who is absent].

        Raises:
            EngineError: too many partitions have none in time, two nodes claim the same one, or one cannot take part.
        """
        self._question = question
        claimed: dict[int, int] = {}
        refused: set[int] = set()
        began_at, is_told = time.monotonic(), False
        for _ in pauses():
            online = self._online()
            self._ask(online)
            if self._members is not None:  # who is revoked or goes meanwhile makes room for who comes
                claimed = {partition: node_id for partition, node_id in claimed.items() if node_id in online}
            for node_id, partitions, refusal in self._answers():
                if refusal and node_id not in self._site_of:
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
            if not is_told and time.monotonic() > began_at + _NAMED_AFTER_S:
                is_told = True
                why = f"it has not answered yet, and is waited for until {timeout_s:g} s are over"
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
        self._tell(self._names(revoked), "revoked", "the run goes on without it")
        self._tell(self._names(absent), "absent", "the run goes on without it, and takes it in when it comes")
        self._known_revoked = self._revoked

    def refresh(self, wanted: Sequence[int]) -> list[int]:
        """Take in who has come, before something is sent to these partitions; returns those of them that no node serves.

        A node that has come may stand for one that has gone; only then its answer is waited for, and only once.
        """
        if self._node_of is None:
            return []
        online, began_at = self._online(), time.monotonic()
        self._ask(online)
        for _ in pauses():
            for node_id, partitions, refusal in self._answers():
                if refusal:
                    _log.warning("a node that has come cannot take part: %s", refusal)
                    self._tell([self._name(node_id)], "refused", refusal)
                for partition in partitions:
                    self._hand_over(partition, node_id, online)
            has_gone = any(self.of(partition) not in online for partition in wanted)
            has_come = any(self._asked.get(node_id, -inf) >= began_at for node_id in self._waiting.values())
            if not (has_gone and has_come) or time.monotonic() > began_at + _REJOIN_S:
                break
        self._note_changes(online)
        return self.absent(wanted) if any(self.of(partition) not in online for partition in wanted) else []

    def shut_down(self, *, timeout_s: float) -> None:
        """Tell every node that serves a partition that the run is over; those that do not answer in time are not waited for."""
        nodes = sorted({*(self._node_of or {}).values()} & self._online())
        pushed = self._push(nodes, wire.SHUTDOWN, {})
        said = Replies(self._grid).arrivals(pushed, Asked("shut down", 0, nodes), deadline=time.monotonic() + timeout_s)
        for _ in said:
            pass  # that they have heard it is enough

    def _online(self) -> set[int]:
        """Nodes that are online; where sites are registered, theirs alone."""
        if self._members is None:
            return set(self._grid.get_node_ids())
        members = sorted(self._members(), key=attrgetter("is_active"))  # the active site of a partition counts
        self._site = {site.partition: site for site in members}
        self._site_of = {site.node_id: site for site in members if site.node_id is not None}
        self._revoked = {site.name for site in members if not site.is_active and site.partition < self._num_partitions}
        return set(self._site_of)

    def tell_of(self, partition: int, event: str, why: str) -> None:
        """Note what has happened to the site of a partition."""
        self._tell(self._names([partition]), event, why)

    def _tell(self, names: Iterable[str], event: str, why: str) -> None:
        for name in names:
            self._note({"site": name, "event": event, "why": why})

    def _name(self, node_id: int) -> str:
        return self._site_of[node_id].name if node_id in self._site_of else "a node"

    def _site_name(self, partition: int) -> str:
        return self._site[partition].name if partition in self._site else ""

    def _names(self, partitions: Sequence[int]) -> list[str]:
        """The sites of partitions, or one name for all where they have none."""
        return _or_numbers([self._site_name(partition) for partition in partitions], partitions)

    def _is_active(self, partition: int) -> bool:
        return partition not in self._site or self._site[partition].is_active

    def _note_changes(self, online: set[int]) -> None:
        """Note who has come, who has gone and who was revoked since the last look."""
        self._tell(sorted(self._revoked - self._known_revoked), "revoked", "the run goes on without it")
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
        """See [Note: who speaks for whom]."""
        if self._members is None:
            return [*claimed]
        site = self._site_of.get(node_id)
        if site is None:  # it was revoked before it answered
            return []
        foreign = [partition for partition in claimed if partition != site.partition]
        if foreign:
            why = f"it claims to be {foreign[:5]}, but its key is registered for partition {site.partition}"
            self._tell([site.name], "refused", why)
        return [site.partition] if site.partition in claimed else []

    def _push(self, node_ids: Iterable[int], kind: str, told: Mapping[str, str]) -> list[str | None]:
        """A message for each node; returns their ids."""
        content = RecordDict({wire.CONFIG: ConfigRecord({**told})})
        return list(self._grid.push_messages([Message(content, node_id, kind) for node_id in node_ids]))

    def _hand_over(self, partition: int, node_id: int, online: set[int]) -> None:
        """To a node that has come, unless the one that serves the partition is still there."""
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
        """Send the roll call's question to those who were not asked yet."""
        now = time.monotonic()
        # who comes back is asked again
        self._asked = {node_id: when for node_id, when in self._asked.items() if node_id in node_ids}
        for node_id in {*self._waiting.values()} & self._asked.keys():
            # Flower lost it, as it does when a machine is very busy; where others still answer, its turn may only not have come.
            # The answer to either question counts.
            if now - max(self._asked[node_id], self._heard_at) > _ASKS_AGAIN_S:
                del self._asked[node_id]
        new = sorted(set(node_ids) - self._asked.keys())
        if not new:
            return
        self._asked |= dict.fromkeys(new, now)
        sent = self._push(new, wire.ROLL_CALL, self._question)
        for message_id, node_id in zip(sent, new, strict=True):
            if message_id:
                self._waiting[message_id] = node_id
            else:
                self._asked.pop(node_id, None)  # it has gone again

    def _answers(self) -> Iterator[tuple[int, list[int], str]]:
        """The answers that are there, taken out of those that are waited for: (node id, partitions, why not)."""
        for reply in self._grid.pull_messages(list(self._waiting)) if self._waiting else ():
            if reply.metadata.reply_to_message_id not in self._waiting:
                continue  # it has answered another question
            node_id, self._heard_at = self._waiting[reply.metadata.reply_to_message_id], time.monotonic()
            self._waiting = {question: asked for question, asked in self._waiting.items() if asked != node_id}
            if reply.has_error() and reply.error.code in _LOST:
                self._asked.pop(node_id, None)  # it is asked again, once it is online
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
    """Names of sites, or the partitions as one name where sites are not registered."""
    return [name for name in names if name] or ([str([*partitions])] if partitions else [])
