"""Prefetch: unshard the next unit and reduce gradients while the model computes.

The prediction is the unit that came next in the last pass of the same kind, forward or backward.  All ranks take the
same path through the model, so all prefetch the same unit and their collectives match.  On a misprediction the actual
unit is unsharded on demand, and the rest of the pass does not prefetch.  A unit that was prefetched too early is used
when its turn comes, or resharded at the end of the pass.

At most one unit's parameters and one unit's gradients are in flight, so a rank holds one unit more than without
prefetch.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fedsign.sharding.executors import Work
from fedsign.sharding.flat import FlatParameter

Pass = Literal["forward", "backward"]
Flats = Sequence[FlatParameter]  # a unit's flat parameters


class ExecutionOrder:
    """Predicts the next unit from the order of the last pass.

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
        """Start a pass."""
        self._last, self._now, self._is_as_expected = self._now, [], True

    def after(self, unit: Flats) -> Flats | None:
        """Record a unit; return the unit expected after it, or None."""
        index = len(self._now)
        self._now.append(unit)
        if not (self._is_as_expected and index < len(self._last) and self._last[index] is unit):
            self._is_as_expected = False
            return None
        return self._last[index + 1] if index + 1 < len(self._last) else None


class Prefetcher:
    """Prefetches for one model; with `is_on=False`, reductions are waited for at once."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._order: ExecutionOrder | None = None  # of the current pass
        self._orders: defaultdict[Pass, ExecutionOrder] = defaultdict(ExecutionOrder)
        self._fetched: Flats = ()
        self._reducing: deque[Sequence[tuple[Work, Tensor]]] = deque()

    def begin(self, kind: Pass) -> None:
        """Start a pass through the whole model."""
        self.end()
        # `end` comes first: an exception may have cut the previous pass short
        self._order = self._orders[kind]
        self._order.begin()

    def end(self) -> None:
        """End the pass and reshard a unit that was prefetched in vain."""
        self._order = None
        fetched, self._fetched = self._fetched, ()
        for flat in fetched:
            flat.reshard()

    def unsharded(self, unit: Flats) -> None:
        """Called when a unit is unsharded and about to run: prefetch the next one."""
        if not self._is_on or self._order is None:
            return
        if unit is self._fetched:  # the prediction was right, the slot is free
            self._fetched = ()
        following = self._order.after(unit)
        # at most one prefetched unit: a wrong one keeps the slot until its turn, or the end of the pass
        if following is not None and not self._fetched and not all(flat.is_unsharded for flat in following):
            for flat in following:
                flat.start_unshard()
            self._fetched = following

    def reduce(self, started: Sequence[tuple[Work, Tensor]]) -> None:
        """Track a unit's reductions, and keep their tensors alive until they are done."""
        if started:
            self._reducing.append(started)
        self._wait(but=1 if self._is_on else 0)  # bounds memory: at most one unit's gradients in flight

    def settle(self) -> None:
        """Wait for everything in flight."""
        self.end()
        self._wait(but=0)

    def forget(self) -> None:
        """Forget the execution order, for example after freezing units; the next pass records it again."""
        self.settle()
        self._orders.clear()

    def _wait(self, *, but: int) -> None:
        while len(self._reducing) > but:
            for work, _ in self._reducing.popleft():
                work.wait()
