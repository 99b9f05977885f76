"""Executors, and the prefetching of the next unit."""

import gc
import sys
import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from fedsign.sharding.executors import Inline, Thread, Work
from fedsign.sharding.prefetch import Pass, Prefetcher


@dataclass(eq=False)
class Fake:
    """A unit's parameters, which note what happens to them."""

    name: str
    log: list[str]
    is_unsharded: bool = False

    def start_unshard(self) -> None:
        if not self.is_unsharded:
            self.log.append(f"+{self.name}")
        self.is_unsharded = True

    def reshard(self) -> None:
        if self.is_unsharded:
            self.log.append(f"-{self.name}")
        self.is_unsharded = False


def through(prefetcher: Prefetcher, units: list[list[Fake]], which: Pass = "forward") -> list[str]:
    """What happens in a pass through these units."""
    log = units[0][0].log
    log.clear()
    prefetcher.begin(which)
    for unit in units:
        (flat,) = unit
        flat.start_unshard()
        prefetcher.unsharded(unit)
        log.append(flat.name)
        flat.reshard()
    prefetcher.end()
    return list(log)


@pytest.fixture
def units() -> list[list[Fake]]:
    log: list[str] = []
    return [[Fake(name, log)] for name in "abc"]


def test_the_first_pass_shows_the_order_and_the_next_ones_prefetch_by_it(units: list[list[Fake]]) -> None:
    prefetcher = Prefetcher(is_on=True)
    one_by_one = ["+a", "a", "-a", "+b", "b", "-b", "+c", "c", "-c"]
    assert through(prefetcher, units) == one_by_one
    assert through(prefetcher, units) == ["+a", "+b", "a", "-a", "+c", "b", "-b", "c", "-c"]
    assert through(prefetcher, units[::-1], "backward")[:3] == ["+c", "c", "-c"], "another way has an order of its own"
    assert through(prefetcher, units[::-1], "backward")[:3] == ["+c", "+b", "c"]
    prefetcher.forget()
    assert through(prefetcher, units) == one_by_one


def test_without_nothing_is_prefetched(units: list[list[Fake]]) -> None:
    prefetcher = Prefetcher(is_on=False)
    assert through(prefetcher, units) == through(prefetcher, units)


def test_a_unit_that_comes_out_of_order_is_gathered_then_and_one_in_vain_goes_at_the_end(
    units: list[list[Fake]],
) -> None:
    prefetcher, (a, b, c) = Prefetcher(is_on=True), units
    through(prefetcher, units)
    assert through(prefetcher, [a, c]) == ["+a", "+b", "a", "-a", "+c", "c", "-c", "-b"]
    through(prefetcher, units)
    assert through(prefetcher, [a, c, b]) == ["+a", "+b", "a", "-a", "+c", "c", "-c", "b", "-b"], (
        "used when its turn comes"
    )


def test_of_reductions_one_unit_is_under_way(units: list[list[Fake]]) -> None:
    prefetcher, log, some = Prefetcher(is_on=True), list[str](), torch.zeros(1)
    for name in "xyz":
        prefetcher.reduce([(Work(partial(log.append, name)), some)])
        prefetcher.reduce([])  # of a unit without any
    assert log == ["x", "y"]
    prefetcher.settle()
    assert log == ["x", "y", "z"]


def test_without_a_reduction_is_waited_for_at_once() -> None:
    prefetcher, log = Prefetcher(is_on=False), list[str]()
    prefetcher.reduce([(Work(partial(log.append, "x")), torch.zeros(1))])
    assert log == ["x"]


def test_a_thread_works_in_order_beside_the_caller_and_waiting_brings_what_was_done() -> None:
    executor, go, done = Thread(), threading.Event(), list[int]()
    first = executor.start(lambda: (go.wait(10), done.append(1))[1])
    second = executor.start(lambda: done.append(2))
    assert not done
    go.set()
    second.wait()
    assert done == [1, 2]
    first.wait()


def test_what_goes_wrong_is_raised_where_it_is_waited_for_and_nothing_is_done_after_it() -> None:
    executor, done = Thread(), list[int]()
    works = [executor.start(lambda: done.append(1 // 0)), executor.start(lambda: done.append(2))]
    for _ in range(2):
        for work in works:
            with pytest.raises(ZeroDivisionError):
                work.wait()
    with pytest.raises(ZeroDivisionError):
        executor.start(lambda: done.append(3)).wait()
    assert not done
    with pytest.raises(ZeroDivisionError):
        Inline().start(lambda: done.append(1 // 0))


def test_a_thread_ends_with_its_executor_and_keeps_no_tensor() -> None:
    before = threading.enumerate()
    executor = Thread()
    (thread,) = [each for each in threading.enumerate() if each not in before]
    tensor = torch.zeros(1)
    seen: list[int] = []
    work = executor.start(lambda kept=tensor: seen.append(kept.numel()))  # type: ignore[misc]
    work.wait()
    assert sys.getrefcount(tensor) == 2
    del executor
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert seen == [1]
