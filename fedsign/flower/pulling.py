"""Pull replies to pushed messages, on time and late: one loop for training and evaluation."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from fedsign.records import LATE

NOT_SENT = "the request could not be sent: its node is not online, or the model is too large"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25


@dataclass(frozen=True, slots=True)
class Requests:
    """A batch of requests; `partitions` in the order of the messages."""

    kind: str  # train, evaluate
    round: int
    partitions: Sequence[int]


Watch = Callable[[Requests, Sequence[int]], None]  # called repeatedly with the partitions that have not replied


class Replies:
    """Replies of a grid.  `is_remote`: nodes are other processes, so a deadline cuts off even nodes that still reply.

    Replies that are no longer needed are pulled too (`late`), since the SuperLink keeps them in memory until then.
    """

    def __init__(self, grid: Grid, watch: Watch = lambda requests, waiting: None, *, is_remote: bool = True) -> None:
        self._grid, self._watch, self._is_remote = grid, watch, is_remote
        # message id -> (request, slot); None: the reply is not needed
        self._overdue: dict[str, tuple[Requests, int] | None] = {}

    def arrivals(
        self,
        pushed: Sequence[str | None],
        requests: Requests,
        *,
        deadline: float,
        resend: Callable[[int, Message], str | None] | None = None,
    ) -> Generator[tuple[int, Message | str], None, None]:
        """(slot, reply) in order of arrival; (slot, reason) for requests not sent and replies not in time.

        `pushed` is the grid's result for the messages: HTTP grids return None for a message that they could not push,
        and an empty list for a batch that is too large.  `resend` may send another message in response to a reply,
        and returns its id: that reply is then waited for instead.
        """
        waiting: dict[str, int] = {}
        for slot, message_id in enumerate(pushed or [None] * len(requests.partitions)):
            if message_id is None:
                yield slot, NOT_SENT
            else:
                waiting[message_id] = slot
        steps = pauses()
        try:
            while waiting:
                next(steps)
                is_over = time.monotonic() > deadline  # before the last pull, which collects what came in time
                self._watch(requests, [requests.partitions[slot] for slot in waiting.values()])
                arrived = list(self._grid.pull_messages(list(waiting)))
                for reply in arrived:
                    slot = waiting.pop(reply.metadata.reply_to_message_id)
                    if resend is None or (message_id := resend(slot, reply)) is None:
                        yield slot, reply
                    else:
                        waiting[message_id] = slot
                if arrived:
                    steps = pauses()  # back to short pauses
                # in process, time passes while a reply is computed: go on as long as there are any
                if is_over and (self._is_remote or not arrived):
                    self._overdue |= {message_id: (requests, slot) for message_id, slot in waiting.items()}
                    slots = [*waiting.values()]
                    # before the yield, where the caller may stop: `finally` must not overwrite these entries
                    waiting.clear()
                    yield from ((slot, LATE) for slot in slots)
        finally:
            self._overdue |= dict.fromkeys(waiting)  # the caller stopped early, but their replies must be pulled, too

    def late(self) -> Iterator[tuple[Requests, int]]:
        """(request, partition) of replies that have arrived too late; expired ones are dropped."""
        for reply in self._grid.pull_messages([*self._overdue]) if self._overdue else ():
            known = self._overdue.pop(reply.metadata.reply_to_message_id, None)
            if known is not None and not reply.has_error():
                requests, slot = known
                yield requests, requests.partitions[slot]


def pauses() -> Iterator[None]:
    """Endless generator with exponentially growing pauses between steps."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
