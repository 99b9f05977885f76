"""What is done ahead of time: the next unit's parameters are gathered, and gradients reduced, while the model computes.

Which unit comes next is what came next in the last pass of the same kind, forward or backward.  Ranks go the same way through the model,
so they all expect the same.  If another one comes, it is gathered then, and nothing is expected any more in this pass; what was
gathered in vain is used when its turn comes, or freed at the pass' end.

One unit's parameters are on their way at a time, and one unit's gradients: a rank has one unit more than without.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from fedsign.sharding.flat import FlatParameter
from fedsign.sharding.lanes import Ticket

Pass = Literal["forward", "backward"]  # a way through the model
Flats = Sequence[FlatParameter]  # of a unit: they come and go together


class Order:
    """What came in the last pass, and so what comes next in this one.

    >>> order = Order()
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
        """What is expected now that this one has come; None, if that is not known."""
        place = len(self._now)
        self._now.append(unit)
        if not (self._is_as_expected and place < len(self._last) and self._last[place] is unit):
            self._is_as_expected = False
            return None
        return self._last[place + 1] if place + 1 < len(self._last) else None


class Ahead:
    """Of one model; `is_on` or not, it is told the same."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._order: Order | None = None  # of the pass that is under way
        self._orders: defaultdict[Pass, Order] = defaultdict(Order)
        self._fetched: Flats = ()
        self._reducing: deque[Sequence[tuple[Ticket, Tensor]]] = deque()

    def begin(self, which: Pass) -> None:
        """A pass through the whole model begins."""
        self.end()
        self._order = self._orders[which]
        self._order.begin()

    def end(self) -> None:
        """It is over: what was gathered in vain goes."""
        self._order = None
        fetched, self._fetched = self._fetched, ()
        for flat in fetched:
            flat.free()

    def came(self, unit: Flats) -> None:
        """A unit is there and about to be used: have the next one come meanwhile."""
        if not self._is_on or self._order is None:
            return
        if unit is self._fetched:
            self._fetched = ()
        following = self._order.after(unit)
        if following is not None and not self._fetched and not all(flat.is_gathered for flat in following):
            for flat in following:
                flat.start_gather()
            self._fetched = following

    def reduce(self, started: Sequence[tuple[Ticket, Tensor]]) -> None:
        """A unit's gradients are being reduced, in these tensors, which are kept until that is waited for."""
        if started:
            self._reducing.append(started)
        self._wait(but=1 if self._is_on else 0)

    def settle(self) -> None:
        """Wait for all that is under way."""
        self.end()
        self._wait(but=0)

    def forget(self) -> None:
        """Expect nothing, until a pass shows it."""
        self.settle()
        self._orders.clear()

    def _wait(self, *, but: int) -> None:
        while len(self._reducing) > but:
            for ticket, _ in self._reducing.popleft():
                ticket.wait()
