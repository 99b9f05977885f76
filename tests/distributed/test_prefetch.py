"""Prefetched parameters and reduced gradients: the same bits, the same bytes, and errors propagate."""

import gc
import threading
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fedsign.sharding.strategy import STRATEGIES
from fedsign.sharding.traffic import Rings
from fedsign.storage.checkpoints import load_latest
from simulations import run
from tests.distributed.branching import engine_of
from tests.distributed.federation import sharding, tree
from tests.distributed.ranks import on_ranks
from tests.distributed.training import Case, Outcome, all_sharded

pytestmark = pytest.mark.slow

THREADS = ("fedsign-collectives", "fedsign-watch")


def cases(prefetch: bool) -> list[Case]:
    """All strategies with what may interfere: tied or frozen weights, recomputation, several micro-batches."""
    common = Case(strategy="", accumulate=2, clip_norm=0.3, prefetch=prefetch)
    return [
        *(
            replace(common, strategy=name, rings=rings, checkpoints="new", freezes=True)
            for name, rings in zip(STRATEGIES, [Rings.TWO_LEVEL, Rings.FLAT] * 7, strict=True)
        ),
        replace(common, strategy="IIG", checkpoints="reentrant"),
        replace(common, strategy="GGG"),
    ]


def trained(prefetch: bool) -> list[Outcome]:
    return all_sharded(cases(prefetch))


def test_all_strategies_give_the_same_bits_and_send_the_same(tmp_path: Path) -> None:
    """Frozen parameters before all that is trained are gathered once in a micro-batch, with or without."""
    plain = on_ranks(4, trained, False, folder=tmp_path / "plain")
    ahead = on_ranks(4, trained, True, folder=tmp_path / "ahead")
    for one, other in zip(chain(*plain), chain(*ahead), strict=True):
        assert one.norms == other.norms
        assert all(torch.equal(one.values[name], value) for name, value in other.values.items())
        without_times = [
            {each: replace(count, elapsed_s=0.0) for each, count in outcome.done.items()} for outcome in (one, other)
        ]
        assert without_times[0] == without_times[1]


ORDERS = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3), (0, 3), (0, 1, 1, 3), (3, 2, 1, 0), (0, 1, 2, 3)]


def in_orders(strategy: str, prefetch: bool) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The model's values in the end, and after each order what is left whole: of parameters, and of what is reduced."""
    engine, left = engine_of(strategy, prefetch=prefetch), []
    model: Any = engine.model
    for step, order in enumerate(ORDERS):
        model.order = order
        with torch.no_grad():
            engine(torch.ones(2, 8))
        engine(torch.full((2, 8), 0.1 * (step + dist.get_rank()))).square().sum().backward()
        engine.step()
        left.append([flat._whole.untyped_storage().nbytes() for flat in engine.flats])
    return engine.full_state_dict(), left


def all_in_orders() -> list[Any]:
    return [[in_orders(name, prefetch) for prefetch in (False, True)] for name in ("GGG", "IIG", "III", "NIG")]


def test_units_that_come_in_another_order_are_gathered_then_and_none_is_left(tmp_path: Path) -> None:
    for rank in on_ranks(4, all_in_orders, folder=tmp_path):
        for number, ((plain, none), (ahead, left)) in enumerate(rank):
            assert all(torch.equal(plain[name], value) for name, value in ahead.items())
            assert left == none
            assert any(any(each) for each in left) == (number == 3), "only where parameters are not sharded they stay"


def own_threads() -> list[str]:
    return sorted({thread.name for thread in threading.enumerate() if thread.name in THREADS})


def ended() -> tuple[list[str], list[str], list[str]]:
    """Threads without prefetching, with it, and when the engines are gone."""
    engine = engine_of("GGG", prefetch=False)
    engine(torch.ones(2, 8)).sum().backward()
    without = own_threads()
    engine = engine_of("GGG", prefetch=True)
    engine(torch.ones(2, 8)).sum().backward()
    engine.step()
    within = own_threads()
    del engine
    gc.collect()
    for thread in threading.enumerate():
        if thread.name in THREADS:
            thread.join(timeout=10)
    return without, within, own_threads()


def test_the_threads_end_with_the_engine(tmp_path: Path) -> None:
    assert on_ranks(4, ended, folder=tmp_path) == [(["fedsign-watch"], [*THREADS], [])] * 4


def failing(prefetch: bool) -> tuple[str, str, float]:
    """Rank 1 fails amid its forward, where the others go on; what each of them says, and after how long."""
    engine = engine_of("GGG", prefetch=prefetch)
    model: Any = engine.model
    for _ in range(2):
        engine(torch.ones(2, 8)).sum().backward()
        engine.step()
    if dist.get_rank() == 1:
        model.order = (0, 1, -1)
    began = time.monotonic()
    try:
        engine(torch.ones(2, 8)).sum().backward()
        engine.step()
    except (ValueError, RuntimeError) as error:
        if isinstance(error, ValueError):
            engine.prefetcher.settle()  # a group must not be destroyed while a collective runs on it
        dist.destroy_process_group()  # and the others lose it
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


@pytest.mark.parametrize("prefetch", [False, True])
def test_where_a_rank_fails_all_hear_of_it(prefetch: bool, tmp_path: Path) -> None:
    found = on_ranks(4, failing, prefetch, folder=tmp_path)
    assert found[1][:2] == ("ValueError", "the model fails")
    for rank in (0, 2, 3):
        assert found[rank][0] == "RuntimeError", found
    assert all(seconds < 60 for _, _, seconds in found)


@pytest.mark.parametrize("way", ["plain", "lisa"])
def test_a_run_that_goes_on_without_gives_the_bits_of_one_with(way: str, tmp_path: Path) -> None:
    """LISA trains other blocks from step to step, so that another unit comes next."""
    whole = run(tree(tmp_path / way, **sharding(way)))
    begun = run(tree(tmp_path / f"{way} again", **sharding(way), rounds=1))
    done = run({"rounds": 2, "client": {"sharding": {"prefetch": False}}}, resume=begun.path)
    mine, theirs = load_latest(done.folder.checkpoints), load_latest(whole.folder.checkpoints)
    assert mine is not None and theirs is not None
    assert all(torch.equal(tensor, theirs.served[name]) for name, tensor in mine.served.items())
    assert done.folder.rounds() == whole.folder.rounds() and not any(line["failures"] for line in done.folder.rounds())
