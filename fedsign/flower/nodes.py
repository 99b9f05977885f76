"""Which node serves which partition: a roll call at the start, and a look at who has come and gone before each sending.

Flower's node ids are random.  A SuperNode that comes back may have another one than before, and one that is struck down is
known to be gone only when its heartbeats have been missing for a while.

[Note: who speaks for whom] Where the operator registers sites with their keys, `members` says which node has which site's key: a site
speaks for its own partition, whatever its node claims.  A claim beyond that is refused and noted.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsign.errors import EngineError
from fedsign.flower import wire
from fedsign.flower.pulling import arrivals, pauses

_REJOIN_S = 15.0  # to be waited for when somebody has gone and somebody else has come
_ASKS_AGAIN_S = 60.0
_log = logging.getLogger("fedsign")


@dataclass(frozen=True, slots=True)
class Member:
    """A site as the operator registered it, and the node that has its key, if that is online."""

    name: str
    partition: int
    node_id: int | None


Members = Callable[[], Sequence[Member]]
Note = Callable[[Mapping[str, str]], None]


class Nodes:
    """The nodes of a grid.  `answers`: what the node of a partition said at the roll call; `note` is told who was refused."""

    def __init__(
        self, grid: Grid, *, num_partitions: int, members: Members | None = None, note: Note = lambda event: None
    ) -> None:
        self._grid, self._num_partitions = grid, num_partitions
        self._members, self._note = members, note
        self._site_of: dict[int, Member] = {}  # by node id, where sites are registered
        self._node_of: dict[int, int] | None = None  # None: a node id is a partition
        self._asked: dict[int, float] = {}  # node id -> when
        self._waiting: dict[str, int] = {}  # message id -> node id
        self._heard_at = 0.0
        self._question: Mapping[str, str] = {}
        self.answers: dict[int, ConfigRecord] = {}

    def of(self, partition: int) -> int:
        """The node that serves a partition."""
        return partition if self._node_of is None else self._node_of[partition]

    def roll_call(self, *, timeout_s: float, question: Mapping[str, str]) -> None:
        """Ask every node which partitions it serves, until each partition has a node; `question`: what else it is asked.

        Raises:
            EngineError: some partition has none in time, two nodes claim the same one, or one cannot take part.
        """
        self._question = question
        claimed: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        for _ in pauses():
            self._ask(self._online())
            for node_id, partitions, refusal in self._answers():
                if refusal:
                    raise EngineError(f"{self._called(node_id)} cannot take part: {refusal}")
                for partition in partitions:
                    if claimed.setdefault(partition, node_id) != node_id:
                        raise EngineError(
                            f"two nodes claim partition {partition}: give every node its own partition-id in --node-config."
                        )
            missing = [partition for partition in range(self._num_partitions) if partition not in claimed]
            if not missing:
                break
            if time.monotonic() > deadline:
                silent = len({*self._waiting.values()})
                unheard = f"; online without an answer: {silent}" if silent else ""
                raise EngineError(
                    f"{len(missing)} of {self._num_partitions} partitions have no node after {timeout_s:g} s (first: "
                    f"{missing[:5]}{unheard}); start their nodes, or lower partition.num_clients."
                )
        self._node_of = claimed

    def refresh(self, wanted: Iterable[int]) -> None:
        """Take in who has come, before something is sent to these partitions.

        A node that has come may stand for one that has gone; only then its answer is waited for.
        """
        if self._node_of is None:
            return
        online = self._online()
        self._ask(online)
        deadline = time.monotonic() + _REJOIN_S
        for _ in pauses():
            for node_id, partitions, refusal in self._answers():
                if refusal:
                    _log.warning("%s that has come cannot take part: %s", self._called(node_id), refusal)
                for partition in partitions:
                    self._hand_over(partition, node_id, online)
            has_gone = any(self._node_of[partition] not in online for partition in wanted)
            if not (has_gone and online.intersection(self._waiting.values())) or time.monotonic() > deadline:
                return

    def shut_down(self, *, timeout_s: float) -> None:
        """Tell every node that serves a partition that the run is over; those that do not answer in time are not waited for."""
        nodes = sorted({*(self._node_of or {}).values()} & self._online())
        pushed = self._push(nodes, wire.SHUTDOWN, {})
        for _ in arrivals(self._grid, pushed, len(nodes), deadline=time.monotonic() + timeout_s):
            """Nothing is asked of them but that they have heard it."""

    def _online(self) -> set[int]:
        """Nodes that are online; where sites are registered, theirs alone."""
        if self._members is None:
            return set(self._grid.get_node_ids())
        self._site_of = {site.node_id: site for site in self._members() if site.node_id is not None}
        return set(self._site_of)

    def _called(self, node_id: int) -> str:
        return f"site {self._site_of[node_id].name}" if node_id in self._site_of else "a node"

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
            self._note({"site": site.name, "event": "refused", "why": why})
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
        if partition not in table:
            _log.warning("a node that has come serves partition %d, which is not asked for", partition)
        elif table[partition] in online:
            _log.warning(
                "a node that has come claims partition %d, which another one serves: it gets no work", partition
            )
        else:
            table[partition] = node_id

    def _ask(self, node_ids: Iterable[int]) -> None:
        """Send the roll call's question to those who were not asked yet."""
        now = time.monotonic()
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
            if reply.has_error():
                yield node_id, [], (reply.error.reason or "it gave no reason").partition("\n")[0]
                continue
            record = wire.of_kind(reply.content, ConfigRecord)[wire.REPLY]
            partitions = self._own(node_id, cast("list[int]", record["partitions"]))
            self.answers |= dict.fromkeys(partitions, record)
            yield node_id, partitions, ""
