"""What comes back for messages that were pushed, as it comes, and what comes too late: one loop for training and for evaluation."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from fedsign.records import LATE

NOT_SENT = "the request could not be sent: its node is not online, or the model is too large"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of whom; `partitions` in the order of the messages."""

    what: str  # train, evaluate
    round: int
    partitions: Sequence[int]


Watch = Callable[[Asked, Sequence[int]], None]  # is told, again and again, who has not replied yet


class Replies:
    """Those of a grid; `is_remote`: of nodes in other processes, which a deadline cuts off even where others still reply.

    A reply that nobody waits for any more is pulled all the same (`late`), since the SuperLink keeps it in memory until then.
    """

    def __init__(self, grid: Grid, watch: Watch = lambda asked, waiting: None, *, is_remote: bool = True) -> None:
        self._grid, self._watch, self._is_remote = grid, watch, is_remote
        self._overdue: dict[
            str, tuple[Asked, int] | None
        ] = {}  # message id -> (what was asked, slot); None: not needed

    def arrivals(
        self,
        pushed: Sequence[str | None],
        asked: Asked,
        *,
        deadline: float,
        asked_again: Callable[[int, Message], str | None] | None = None,
    ) -> Generator[tuple[int, Message | str], None, None]:
        """(slot, reply) in order of arrival; (slot, why not) for what was not sent, or did not come in time.

        `pushed` is what the grid said to the messages: HTTP grids mark with None what could not be pushed, and give nothing for a
        batch that is too large.  `asked_again` may send another message in answer to a reply: its id, which is waited for in the
        place of the reply.
        """
        waiting: dict[str, int] = {}
        for slot, message_id in enumerate(pushed or [None] * len(asked.partitions)):
            if message_id is None:
                yield slot, NOT_SENT
            else:
                waiting[message_id] = slot
        steps = pauses()
        try:
            while waiting:
                next(steps)
                is_over = time.monotonic() > deadline  # asked before the last pull, which takes what came in time
                self._watch(asked, [asked.partitions[slot] for slot in waiting.values()])
                arrived = list(self._grid.pull_messages(list(waiting)))
                for reply in arrived:
                    slot = waiting.pop(reply.metadata.reply_to_message_id)
                    if asked_again is None or (message_id := asked_again(slot, reply)) is None:
                        yield slot, reply
                    else:
                        waiting[message_id] = slot
                if arrived:
                    steps = pauses()  # short ones again
                if is_over and (self._is_remote or not arrived):
                    self._overdue |= {message_id: (asked, slot) for message_id, slot in waiting.items()}
                    slots = [*waiting.values()]
                    waiting.clear()
                    yield from ((slot, LATE) for slot in slots)
        finally:
            self._overdue |= dict.fromkeys(waiting)

    def late(self) -> Iterator[tuple[Asked, int]]:
        """What was asked and of which partition, of replies that have come since; what can come no more is forgotten."""
        for reply in self._grid.pull_messages([*self._overdue]) if self._overdue else ():
            known = self._overdue.pop(reply.metadata.reply_to_message_id, None)
            if known is not None and not reply.has_error():
                asked, slot = known
                yield asked, asked.partitions[slot]


def pauses() -> Iterator[None]:
    """Endless; longer and longer pauses between its steps."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
