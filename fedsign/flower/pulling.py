"""What comes back for messages that were pushed, as it comes: one loop for training and for evaluation."""

import time
from collections.abc import Callable, Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from fedsign.records import LATE

NOT_SENT = "the request could not be sent to the node (is it online, is the model too large?)"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25


def arrivals(
    grid: Grid,
    pushed: Sequence[str | None],
    num_messages: int,
    *,
    deadline: float,
    asked_again: Callable[[int, Message], str | None] | None = None,
) -> Iterator[tuple[int, Message | str]]:
    """(slot, reply) in order of arrival; (slot, why not) for what was not sent, or did not come in time.

    `pushed` is what the grid said to the messages: HTTP grids mark with None what could not be pushed, and give nothing for a
    batch that is too large.  `asked_again` may send another message in answer to a reply: its id, which is waited for in the
    place of the reply.
    """
    waiting: dict[str, int] = {}
    for slot, message_id in enumerate(pushed or [None] * num_messages):
        if message_id is None:
            yield slot, NOT_SENT
        else:
            waiting[message_id] = slot
    steps = pauses()
    while waiting:
        next(steps)
        arrived = list(grid.pull_messages(list(waiting)))
        for reply in arrived:
            slot = waiting.pop(reply.metadata.reply_to_message_id)
            if asked_again is None or (message_id := asked_again(slot, reply)) is None:
                yield slot, reply
            else:
                waiting[message_id] = slot
        if arrived:
            steps = pauses()  # short ones again
        elif time.monotonic() > deadline:
            yield from ((slot, LATE) for slot in waiting.values())
            return


def pauses() -> Iterator[None]:
    """Endless; longer and longer pauses between its steps."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
