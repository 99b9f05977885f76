"""Count the live bytes of a block of code: now, at the peak, and by category.

Two counters answer different questions.  `LiveBytes` tracks every storage that torch creates or frees, on any device
including `meta`, and attributes the peak to categories.  `allocated` asks the allocator, which also sees the scratch
memory of kernels: on CUDA through its statistics, on the CPU through the events of torch's profiler.

On the CPU both report the same peak for a training step, except for kernel scratch and a few bytes of scalars
(`tests/memory/test_live_bytes.py`).  On CUDA the allocator takes larger blocks (`cuda_block`).
"""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OTHER = "other"
"""The category of unnamed storages: activations, batches, temporaries."""

# torch.tensor() dispatches this op, whose output is its argument; the argument itself was never seen before
_FRESH = {torch.ops.aten.lift_fresh.default}


def cuda_block(num_bytes: int) -> int:
    """The bytes that PyTorch's CUDA allocator takes for a storage: of a segment, no rest of 1 MiB is left over.

    >>> [cuda_block(size) for size in (1, 4000, 2**20 + 1, 11 * 2**20)], 12 * 2**20
    ([512, 4096, 1049088, 12582912], 12582912)
    """
    rounded = -(-num_bytes // 512) * 512
    segment = -(-rounded // 2**21) * 2**21
    return segment if rounded >= 10 * 2**20 and segment - rounded <= 2**20 else rounded


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The moment with the most live bytes."""

    total_bytes: int
    by_category: Mapping[str, int]
    phase: str


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are alive inside the block: those created there, and those that were named.

    A storage counts once, however many tensors view it, until the last one is gone.  `name` assigns a category
    retroactively, for the storage's whole life, so gradients may be named after the backward pass.  Storages that
    existed before the block count from when they are named.  Memory that `from_numpy` borrows counts as well, although
    the allocator does not know it.  A memory-mapped file must be named.  Resizing a storage in place is not seen.
    `size_of` says what an allocator takes for so many bytes.

    >>> with LiveBytes() as live:
    ...     weights = torch.zeros(1000)
    ...     live.name("weights", [weights])
    ...     product = (weights * 2).sum()
    >>> live.peak.by_category, live.current
    ({'weights': 4000, 'other': 4004}, {'weights': 4000, 'other': 4})
    """

    def __init__(self, *, size_of: Callable[[int], int] = int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._size_of = size_of
        self._events: list[tuple[int, int, str]] = []  # (storage number, change in bytes, phase), in order
        self._phase = ""
        self._categories: dict[int, str] = {}
        self._devices: dict[int, int] = {}
        self.device = 0  # simulated device of the storages created from now on
        self._alive: dict[int, tuple[int, int, Any]] = {}  # address -> number, bytes, weak reference with a callback
        self._num_storages = 0

    @property
    def current(self) -> dict[str, int]:
        """Live bytes by category; empty categories are omitted."""
        return self._by_category((number, size) for number, size, _ in self._alive.values())

    @property
    def peak(self) -> Peak:
        """The peak over all phases and devices."""
        return self.peak_of()

    def peak_of(self, phase: str | None = None, *, device: int | None = None) -> Peak:
        """The peak within one phase (any if None) and on one device (all together if None)."""
        inside = [at for at, (_, _, of) in enumerate(self._events) if phase in (None, of)]
        changes = [
            (number, change if device in (None, self._devices[number]) else 0) for number, change, _ in self._events
        ]
        totals = list(accumulate(change for _, change in changes))
        at = max(inside, key=totals.__getitem__, default=-1)  # the first of equals
        by_category = self._by_category(changes[: at + 1])
        return Peak(
            total_bytes=sum(by_category.values()), by_category=by_category, phase=self._events[at][2] if inside else ""
        )

    def most_of(self, category: str) -> int:
        """The maximum of one category's live bytes."""
        own = [change for number, change, _ in self._events if self._categories.get(number, OTHER) == category]
        return max(accumulate(own), default=0)

    def name(self, category: str, tensors: Iterable[Tensor | None], *, device: int | None = None) -> None:
        """Assign a category, and optionally a device, to the tensors' storages; count those that were not seen yet."""
        for tensor in tensors:
            if tensor is not None:
                number = self._number_of(tensor.untyped_storage())
                self._categories[number] = category
                if device is not None:
                    self._devices[number] = device

    def begin(self, phase: str) -> None:
        """Start a phase."""
        self._phase = phase

    def _by_category(self, changes: Iterable[tuple[int, int]]) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for number, change in changes:
            sizes[self._categories.get(number, OTHER)] += change
        return {category: size for category, size in sizes.items() if size}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its new storages: outputs that neither are nor view its inputs."""
        outputs = func(*args, **(kwargs or {}))
        storages = [storage for storage in map(_storage_of, tree_leaves(outputs)) if storage is not None]
        unknown = [storage for storage in storages if storage._cdata not in self._alive]
        if unknown:
            given = () if func in _FRESH else map(_storage_of, tree_leaves((args, kwargs)))
            own = {storage._cdata for storage in given if storage is not None}
            for storage in unknown:
                if storage._cdata not in own:
                    self._number_of(storage)
        return outputs

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage, which counts from now on."""
        # an address may be reused once its storage is freed, hence running numbers
        address = storage._cdata
        if address in self._alive:
            return self._alive[address][0]
        number, size = self._num_storages, self._size_of(storage.nbytes())
        self._num_storages += 1
        self._devices[number] = self.device
        self._events.append((number, size, self._phase))

        # the callback runs when the storage is freed, which gives an exact event without polling
        def end(_: object) -> None:
            self._events.append((number, -size, self._phase))
            self._alive.pop(address, None)

        # the reference is stored, or its callback would be dropped with it
        self._alive[address] = number, size, weakref.ref(storage, end)
        return number


def _storage_of(value: Any) -> torch.UntypedStorage | None:
    # sparse layouts have no storage of their own
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()


@dataclass(slots=True)
class Allocated:
    """The allocator's counts, available after the block: bytes still held, and the peak."""

    kept_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def allocated(device: torch.device) -> Iterator[Allocated]:
    """Count what a device's allocator hands out inside the block, relative to its start.

    On the CPU, memory that was allocated before the block and freed inside it is not seen.
    """
    counted = Allocated()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        # sets the peak to what is allocated now, hence the subtraction below
        torch.cuda.reset_peak_memory_stats(device)
        yield counted
        torch.cuda.synchronize(device)
        counted.kept_bytes = torch.cuda.memory_allocated(device) - before
        counted.peak_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with _quiet(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        yield counted
    changes = [
        (event.start_ns(), event.nbytes()) for event in profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    # by time alone: a stable sort keeps the order of events with equal stamps
    totals = list(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))
    counted.kept_bytes, counted.peak_bytes = (totals[-1], max(0, *totals)) if totals else (0, 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler from logging its start and end to standard error."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
