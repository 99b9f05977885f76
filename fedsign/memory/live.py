"""Live bytes of a block of code: now, at the peak, and of whom.

Two counts, for different questions.  `LiveBytes` sees every storage that torch makes or lets go while it is entered,
on any device, `meta` included, and says of which category what was alive at the peak.  `allocated` asks the allocator, which
also knows what a kernel takes for itself: on CUDA its own account, on the CPU the events that torch's profiler is sent.

On the CPU a step of forward, backward and optimizer gives the same peak by both, but for the kernels' own scratch and numbers
of a few bytes (`tests/memory/test_live_bytes.py`); on CUDA the allocator rounds each storage up to 512 bytes.
"""

import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER = "other"
"""The category of storages that were not named: activations, batches, temporaries."""

_FRESH = {
    torch.ops.aten.lift_fresh.default
}  # what torch.tensor() makes: it gives back its argument, which nobody has seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment at which most was alive."""

    total_bytes: int
    by_category: Mapping[str, int]
    phase: str


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are alive inside the block: those made there, and those that were named.

    A storage counts once, however many tensors look at it, until the last of them is gone.  `name` gives
    storages a category, for their whole life: gradients may be named when the backward pass has made them.  What was
    there before the block counts once it is named.  What `from_numpy` borrows counts too, although the allocator does not know of
    it; a file that is mapped has to be named, and a storage that is resized in place keeps its first size.

    >>> with LiveBytes() as live:
    ...     weights = torch.zeros(1000)
    ...     live.name("weights", [weights])
    ...     product = (weights * 2).sum()
    >>> live.peak.by_category, live.current
    ({'weights': 4000, 'other': 4004}, {'weights': 4000, 'other': 4})
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._events: list[tuple[int, int, str]] = []  # (number of the storage, bytes gained or lost, phase), in order
        self._phase = ""
        self._categories: dict[int, str] = {}
        self._places: dict[int, int] = {}
        self.place = 0  # of what is made from here on, where the block is played for several devices
        self._alive: dict[int, tuple[int, int, Any]] = {}  # its address -> number, bytes, the watch over its end
        self._num_storages = 0

    @property
    def current(self) -> dict[str, int]:
        """Alive now, by category; categories of which nothing is alive are left out."""
        return self._by_category((number, size) for number, size, _ in self._alive.values())

    @property
    def peak(self) -> Peak:
        """When most was alive, since the beginning."""
        return self.peak_of()

    def peak_of(self, phase: str | None = None, *, place: int | None = None) -> Peak:
        """When most was alive in one phase, or, without one, at any time; on one of several places, or on all."""
        inside = [at for at, (_, _, of) in enumerate(self._events) if phase in (None, of)]
        changes = [
            (number, change if place in (None, self._places[number]) else 0) for number, change, _ in self._events
        ]
        totals = list(accumulate(change for _, change in changes))
        at = max(inside, key=totals.__getitem__, default=-1)  # the first of equals
        by_category = self._by_category(changes[: at + 1])
        return Peak(
            total_bytes=sum(by_category.values()), by_category=by_category, phase=self._events[at][2] if inside else ""
        )

    def most_of(self, category: str) -> int:
        """The most bytes of one category that were alive at a time."""
        own = [change for number, change, _ in self._events if self._categories.get(number, OTHER) == category]
        return max(accumulate(own), default=0)

    def name(self, category: str, tensors: Iterable[Tensor | None], *, place: int | None = None) -> None:
        """Give the storages of these tensors a category, and a place, and count those that were not counted so far."""
        for tensor in tensors:
            if tensor is not None:
                number = self._seen(tensor.untyped_storage())
                self._categories[number] = category
                if place is not None:
                    self._places[number] = place

    def begin(self, phase: str) -> None:
        """What comes from here on belongs to this phase."""
        self._phase = phase

    def _by_category(self, changes: Iterable[tuple[int, int]]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for number, change in changes:
            found[self._categories.get(number, OTHER)] += change
        return {category: size for category, size in found.items() if size}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it has made: outputs that are no views of its inputs, nor the inputs themselves."""
        outputs = func(*args, **(kwargs or {}))
        storages = [storage for storage in map(_storage_of, tree_leaves(outputs)) if storage is not None]
        unknown = [storage for storage in storages if storage._cdata not in self._alive]
        if unknown:
            given = () if func in _FRESH else map(_storage_of, tree_leaves((args, kwargs)))
            own = {storage._cdata for storage in given if storage is not None}
            for storage in unknown:
                if storage._cdata not in own:
                    self._seen(storage)
        return outputs

    def _seen(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage, which is counted from now on."""
        address = storage._cdata
        if address in self._alive:
            return self._alive[address][0]
        number, size = self._num_storages, storage.nbytes()
        self._num_storages += 1
        self._places[number] = self.place
        self._events.append((number, size, self._phase))

        def end(_: object) -> None:
            self._events.append((number, -size, self._phase))
            self._alive.pop(address, None)

        self._alive[address] = number, size, weakref.ref(storage, end)
        return number


def _storage_of(value: Any) -> torch.UntypedStorage | None:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()


@dataclass(slots=True)
class Allocated:
    """What the allocator says, once the block is left: what the block has kept, and the most that it held at a time."""

    kept_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def allocated(device: torch.device) -> Iterator[Allocated]:
    """Count what the allocator of a device gives out inside the block, on top of what was given out before.

    On the CPU it is not seen if the block lets go of what is older than the block.
    """
    found = Allocated()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize(device)
        found.kept_bytes = torch.cuda.memory_allocated(device) - before
        found.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with _quiet(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        yield found
    changes = [
        (event.start_ns(), event.nbytes()) for event in profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    totals = list(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))
    found.kept_bytes, found.peak_bytes = (totals[-1], max(0, *totals)) if totals else (0, 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler would say on standard error that it begins and ends."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
