"""A Flower Grid whose nodes are computed in this process, one partition a node, nothing serialized.

Replies are made when they are pulled: a cohort of thousands holds one reply at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from flwr.app import Message
from flwr.supercore.run import Run

from fedsign.flower.shims import MessageGrid, empty_run, ensure_task_identity, set_message_id

Handler = Callable[[Sequence[Message]], Iterator[Message]]


class InProcessGrid(MessageGrid):
    """Node ids are 0 ... num_nodes - 1.  `handle` answers a batch of messages, in any order, lazily."""

    def __init__(self, num_nodes: int, handle: Handler) -> None:
        ensure_task_identity()
        self._num_nodes = num_nodes
        self._handle = handle
        self._batches: list[Iterator[Message]] = []
        self._arrived: dict[str, Message] = {}
        self._run = empty_run()
        self._num_pushed = 0

    def set_run(self, run: Run) -> None:
        """Take over a run's information."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's information."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return range(self._num_nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages in as one batch; the work is done when replies are pulled."""
        batch = list(messages)
        for message in batch:
            set_message_id(message, str(self._num_pushed))
            self._num_pushed += 1
        self._batches.append(self._handle(batch))
        return [message.metadata.message_id for message in batch]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies to these messages: those that are there, or else the next that can be computed."""
        wanted = set(message_ids)
        while not (ready := wanted & self._arrived.keys()):
            if not self._compute_one():
                return []
        return [self._arrived.pop(message_id) for message_id in sorted(ready)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push, then pull until all replies are there."""
        waiting = set(self.push_messages(messages))
        replies: list[Message] = []
        while waiting and (arrived := list(self.pull_messages(waiting))):
            replies += arrived
            waiting -= {message.metadata.reply_to_message_id for message in arrived}
        return replies

    def _compute_one(self) -> bool:
        while self._batches:
            reply = next(self._batches[0], None)
            if reply is not None:
                self._arrived[reply.metadata.reply_to_message_id] = reply
                return True
            self._batches.pop(0)
        return False
