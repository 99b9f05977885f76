"""Work that is handed to a thread, and what is expected to come next."""

import gc
import sys
import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from fedsign.sharding.ahead import Ahead, Pass
from fedsign.sharding.lanes import Here, Thread, Ticket


@dataclass(eq=False)
class Fake:
    """A unit's parameters, which note what happens to them."""

    name: str
    log: list[str]
    is_gathered: bool = False

    def start_gather(self) -> None:
        if not self.is_gathered:
            self.log.append(f"+{self.name}")
        self.is_gathered = True

    def free(self) -> None:
        if self.is_gathered:
            self.log.append(f"-{self.name}")
        self.is_gathered = False


def through(ahead: Ahead, units: list[list[Fake]], which: Pass = "forward") -> list[str]:
    """What happens in a pass through these units."""
    log = units[0][0].log
    log.clear()
    ahead.begin(which)
    for unit in units:
        (flat,) = unit
        flat.start_gather()
        ahead.came(unit)
        log.append(flat.name)
        flat.free()
    ahead.end()
    return list(log)


@pytest.fixture
def units() -> list[list[Fake]]:
    log: list[str] = []
    return [[Fake(name, log)] for name in "abc"]


def test_the_first_pass_shows_the_order_and_the_next_ones_are_ahead_of_it(units: list[list[Fake]]) -> None:
    ahead = Ahead(is_on=True)
    one_by_one = ["+a", "a", "-a", "+b", "b", "-b", "+c", "c", "-c"]
    assert through(ahead, units) == one_by_one
    assert through(ahead, units) == ["+a", "+b", "a", "-a", "+c", "b", "-b", "c", "-c"]
    assert through(ahead, units[::-1], "backward")[:3] == ["+c", "c", "-c"], "another way has an order of its own"
    assert through(ahead, units[::-1], "backward")[:3] == ["+c", "+b", "c"]
    ahead.forget()
    assert through(ahead, units) == one_by_one


def test_without_nothing_is_ahead(units: list[list[Fake]]) -> None:
    ahead = Ahead(is_on=False)
    assert through(ahead, units) == through(ahead, units)


def test_a_unit_that_comes_out_of_order_is_gathered_then_and_one_in_vain_goes_at_the_end(
    units: list[list[Fake]],
) -> None:
    ahead, (a, b, c) = Ahead(is_on=True), units
    through(ahead, units)
    assert through(ahead, [a, c]) == ["+a", "+b", "a", "-a", "+c", "c", "-c", "-b"]
    through(ahead, units)
    assert through(ahead, [a, c, b]) == ["+a", "+b", "a", "-a", "+c", "c", "-c", "b", "-b"], "used when its turn comes"


def test_of_reductions_one_unit_is_under_way(units: list[list[Fake]]) -> None:
    ahead, log, some = Ahead(is_on=True), list[str](), torch.zeros(1)
    for name in "xyz":
        ahead.reduce([(Ticket(partial(log.append, name)), some)])
        ahead.reduce([])  # of a unit without any
    assert log == ["x", "y"]
    ahead.settle()
    assert log == ["x", "y", "z"]


def test_without_a_reduction_is_waited_for_at_once() -> None:
    ahead, log = Ahead(is_on=False), list[str]()
    ahead.reduce([(Ticket(partial(log.append, "x")), torch.zeros(1))])
    assert log == ["x"]


def test_a_thread_works_in_order_beside_the_caller_and_waiting_brings_what_was_done() -> None:
    lane, go, done = Thread(), threading.Event(), list[int]()
    first = lane.start(lambda: (go.wait(10), done.append(1))[1])
    second = lane.start(lambda: done.append(2))
    assert not done
    go.set()
    second.wait()
    assert done == [1, 2]
    first.wait()


def test_what_goes_wrong_is_raised_where_it_is_waited_for_and_nothing_is_done_after_it() -> None:
    lane, done = Thread(), list[int]()
    tickets = [lane.start(lambda: done.append(1 // 0)), lane.start(lambda: done.append(2))]
    for _ in range(2):
        for ticket in tickets:
            with pytest.raises(ZeroDivisionError):
                ticket.wait()
    with pytest.raises(ZeroDivisionError):
        lane.start(lambda: done.append(3)).wait()
    assert not done
    with pytest.raises(ZeroDivisionError):
        Here().start(lambda: done.append(1 // 0))


def test_a_thread_ends_with_its_lane_and_keeps_no_tensor() -> None:
    before = threading.enumerate()
    lane = Thread()
    (thread,) = [each for each in threading.enumerate() if each not in before]
    tensor = torch.zeros(1)
    seen: list[int] = []
    ticket = lane.start(lambda kept=tensor: seen.append(kept.numel()))  # type: ignore[misc]
    ticket.wait()
    assert sys.getrefcount(tensor) == 2
    del lane
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert seen == [1]
