"""Detect ranks that run different collectives, because they took different paths through the model.

The digest of all collectives so far is the tag of a rank's messages (with gloo; NCCL has no tags).  Messages of
different collectives therefore never meet: ranks that have diverged wait instead of computing wrong numbers.  A rank
that waits for long publishes its collectives since the last step in the store of the process group, and compares them
with those of others that wait.  If they differ, it publishes the difference for all, closes its connections, which
wakes up those that wait for it, and raises `DivergedError`; so does each of them.  Waiting for a slow rank is no error.
Several engines in a process group are compared one by one.

Digests are also compared once per step (`fedsign.sharding.agreement`), for backends without tags.
"""

import json
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fedsign.errors import DivergedError

_LOOK_S = 1.0  # between two looks at a collective; only one that is found twice is compared
_ALL_S, _RETRY_S = 10.0, 0.05
_MAX_KEPT = 4096  # collectives; an engine that never steps would keep more and more
_TAGS = 0x7FFFFFFF
_NO_TAG = 0  # of the message that never comes


class Trail:
    """The last collectives of a rank's engine since all ranks agreed."""

    def __init__(self, rank: int, ranks: int) -> None:
        """Begin on the default process group; every rank makes its engines in the same order."""
        group: Any = dist.group.WORLD
        self._rank, self._ranks = rank, ranks
        self._group = weakref.ref(group)  # when it has been destroyed, the default one may be another
        # an earlier engine had other collectives at the same numbers
        self._engine: int = group.get_group_store().add(f"fedsign-engines-{rank}", 1)
        self._recent = deque[tuple[int, str]](maxlen=_MAX_KEPT)  # with numbers, since other threads read it
        self._num = 0
        self.digest = 0
        self.running: int | None = None  # the number of the collective in progress

    @property
    def tag(self) -> int:
        """The tag of messages of the current collective."""
        return self.digest & _TAGS

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Run a collective.

        Raises:
            DivergedError: another rank is at another one.
        """
        self._recent.append((self._num, name))
        self.digest = zlib.crc32(name.encode(), self.digest)
        self.running, self._num = self._num, self._num + 1
        try:
            yield
        except RuntimeError as error:
            if difference := self.difference():
                self.disconnect()  # the error may have come from one peer, and others wait for this rank
                raise DivergedError(difference) from error
            raise
        finally:
            self.running = None

    def settle(self) -> None:
        """Forget the collectives, once all ranks have agreed on them."""
        self._recent.clear()

    def difference(self) -> str:
        """Publish the collectives, and compare them with what others have published; empty if they agree.

        A difference that any rank has found is that of all, since a rank may wait before its own path differs.
        """
        group = self._group()
        if group is None:
            return ""  # the process group was destroyed meanwhile
        try:
            return self._compared(group.get_group_store())
        except RuntimeError:
            return ""  # the store is gone, and with it whoever kept it; the collective's own error says more

    def _compared(self, store: Any) -> str:
        mine, found = dict(self._recent), self._key("difference")
        store.set(self._key(self._rank), json.dumps([*mine.items()]))
        if store.check([found]):
            return str(store.get(found).decode())
        for other in range(self._ranks):
            if other != self._rank and store.check([self._key(other)]):
                theirs: dict[int, str] = dict(json.loads(store.get(self._key(other))))
                for number in sorted(mine.keys() & theirs.keys()):
                    if mine[number] != theirs[number]:
                        (one, here), (two, there) = sorted([(self._rank, mine[number]), (other, theirs[number])])
                        difference = (
                            f"rank {one} was at the {here}, where rank {two} was at the {there}; all ranks must take "
                            "the same path through the model, so let it not depend on the samples of a batch."
                        )
                        store.set(found, difference)
                        return difference
        return ""

    def difference_from_all(self) -> str:
        """`difference`, once all others have published theirs, as they do when the digests of a step differ."""
        deadline = time.monotonic() + _ALL_S
        while not (difference := self.difference()) and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
        return difference or "the ranks ran different collectives; all must take the same path through the model."

    def disconnect(self) -> None:
        """Fail all communication of this rank, here and at its peers."""
        group = self._group()
        if group is None:
            return
        if group.name() == "nccl":
            group.abort()
            return
        # Gloo has no other way: a wait that is over in time closes all connections.  One that a peer has closed
        # already fails at once, and leaves the others open.
        for peer in {*range(self._ranks)} - {self._rank}:
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))

    def _key(self, of: object) -> str:
        return f"fedsign-collectives-{self._engine}-{of}"


def watch(owner: object, trail: Trail) -> None:
    """Start a thread that looks after collectives which take long; it ends with their owner."""
    is_over = threading.Event()
    weakref.finalize(owner, is_over.set)
    threading.Thread(target=_look, args=(trail, is_over), name="fedsign-watch", daemon=True).start()


def _look(trail: Trail, is_over: threading.Event) -> None:
    last = None
    while not is_over.wait(_LOOK_S):
        running = trail.running
        # it still waits after it has published: the others may have published later
        if running is not None and running == last and trail.difference():
            trail.disconnect()  # so that its collective raises
            return
        last = running
