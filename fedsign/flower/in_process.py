"""A Flower Grid whose nodes run in this process, one partition per node, without serialization.

Replies are computed when they are pulled, so even a cohort of thousands holds one reply at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from flwr.app import Message
from flwr.supercore.run import Run

from fedsign.flower.shims import MessageGrid, empty_run, ensure_task_identity, set_message_id

Handler = Callable[[Sequence[Message]], Iterator[Message]]


class InProcessGrid(MessageGrid):
    """Node ids are 0 ... num_nodes - 1.  `handle` lazily yields the replies to a batch of messages, in any order."""

    def __init__(self, num_nodes: int, handle: Handler) -> None:
        ensure_task_identity()
        self._num_nodes = num_nodes
        self._handle = handle
        self._batches: list[Iterator[Message]] = []
        self._arrived: dict[str, Message] = {}
        self._run = empty_run()
        self._num_pushed = 0

    def set_run(self, run: Run) -> None:
        """Set the run's information."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's information."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return range(self._num_nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue a batch of messages; the work happens when replies are pulled."""
        batch = list(messages)
        for message in batch:
            set_message_id(message, str(self._num_pushed))
            self._num_pushed += 1
        self._batches.append(self._handle(batch))  # a generator, which has not started
        return [message.metadata.message_id for message in batch]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies available for these messages; if there are none, computes the next one."""
        wanted = set(message_ids)
        while not (ready := wanted & self._arrived.keys()):
            if not self._compute_one():
                return []
        return [self._arrived.pop(message_id) for message_id in sorted(ready)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push, then pull until all replies have arrived."""
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
