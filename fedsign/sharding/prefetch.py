"""Prefetching: the next unit is unsharded, and gradients are reduced, while the model computes.

The next unit is the one that followed in the last pass of the same kind, forward or backward.  All ranks take the same way through
the model, so all prefetch the same unit.  If another unit comes, it is unsharded then, and nothing is prefetched in the rest of the
pass; a unit that was prefetched in vain is used when its turn comes, or resharded at the end of the pass.

One unit's parameters are in flight at a time, and one unit's gradients: a rank holds one unit more than without prefetching.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fedsign.sharding.executors import Work
from fedsign.sharding.flat import FlatParameter

Pass = Literal["forward", "backward"]  # a way through the model
Flats = Sequence[FlatParameter]  # of a unit: unsharded and resharded together


class ExecutionOrder:
    """The units of the last pass in order, and so the next one of this pass.

    >>> order = ExecutionOrder()
    >>> [order.after(name) for name in ("a", "b", "c")]
    [None, None, None]
    >>> order.begin()
    >>> [order.after(name) for name in ("a", "b", "x", "c")]
    ['b', 'c', None, None]
    >>> order.begin()
    >>> [order.after(name) for name in ("a", "b")]
    ['b', 'x']
    """

    def __init__(self) -> None:
        self._last: list[Flats] = []
        self._now: list[Flats] = []
        self._is_as_expected = True

    def begin(self) -> None:
        """Another pass."""
        self._last, self._now, self._is_as_expected = self._now, [], True

    def after(self, unit: Flats) -> Flats | None:
        """The unit expected after this one; None if unknown."""
        place = len(self._now)
        self._now.append(unit)
        if not (self._is_as_expected and place < len(self._last) and self._last[place] is unit):
            self._is_as_expected = False
            return None
        return self._last[place + 1] if place + 1 < len(self._last) else None


class Prefetcher:
    """Prefetches for one model; with `is_on=False` it does nothing."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._order: ExecutionOrder | None = None  # of the current pass
        self._orders: defaultdict[Pass, ExecutionOrder] = defaultdict(ExecutionOrder)
        self._fetched: Flats = ()
        self._reducing: deque[Sequence[tuple[Work, Tensor]]] = deque()

    def begin(self, which: Pass) -> None:
        """A pass through the whole model begins."""
        self.end()
        self._order = self._orders[which]
        self._order.begin()

    def end(self) -> None:
        """The pass is over: reshard what was prefetched in vain."""
        self._order = None
        fetched, self._fetched = self._fetched, ()
        for flat in fetched:
            flat.reshard()

    def unsharded(self, unit: Flats) -> None:
        """A unit is unsharded and about to be used: prefetch the next one."""
        if not self._is_on or self._order is None:
            return
        if unit is self._fetched:
            self._fetched = ()
        following = self._order.after(unit)
        if following is not None and not self._fetched and not all(flat.is_unsharded for flat in following):
            for flat in following:
                flat.start_unshard()
            self._fetched = following

    def reduce(self, started: Sequence[tuple[Work, Tensor]]) -> None:
        """A unit's gradients are being reduced in these tensors, which are kept until then."""
        if started:
            self._reducing.append(started)
        self._wait(but=1 if self._is_on else 0)

    def settle(self) -> None:
        """Wait for everything in flight."""
        self.end()
        self._wait(but=0)

    def forget(self) -> None:
        """Forget the order of units; the next pass shows it."""
        self.settle()
        self._orders.clear()

    def _wait(self, *, but: int) -> None:
        while len(self._reducing) > but:
            for work, _ in self._reducing.popleft():
                work.wait()
