"""Ranks that take different paths through the model fail within a step, and name units and ranks."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fedsign.errors import DivergedError
from fedsign.sharding import divergence
from fedsign.sharding.divergence import Trail
from fedsign.sharding.paro import Sharded
from tests.distributed.branching import engine_of
from tests.distributed.ranks import on_ranks

RANKS, LOOK_S, LATE_S = 4, 0.1, 0.5
WAYS = {  # the layers that rank 1 passes, and all others; 4 is larger
    "another of equal size": ((0, 1, 3), (0, 2, 3)),
    "one more": ((0, 1, 2, 3), (0, 1, 3)),
    "one less": ((0, 3), (0, 1, 3)),
    "another of another size": ((0, 4, 3), (0, 1, 3)),
}


def step(engine: Sharded) -> None:
    engine(torch.ones(2, 8)).sum().backward()
    engine.step()


def diverging(folder: Path) -> dict[str, str]:
    """What this rank raises, of each way; nothing where a rank is only late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "_LOOK_S", LOOK_S)
        return {**diverging_ways(folder), "without tags": diverging_without_tags()}


def diverging_ways(folder: Path) -> dict[str, str]:
    rank, found = dist.get_rank(), {}
    for name, (mine, theirs) in WAYS.items():
        for strategy, prefetch in (("GGG", True), ("IIG", False)):
            key = f"{name}, {strategy}"
            engine = engine_of(strategy, prefetch=prefetch)
            step(engine)
            model: Any = engine.model
            model.order = mine if rank == 1 else theirs
            with pytest.raises(DivergedError) as raised:
                step(engine)
            found[key] = str(raised.value)
            dist.destroy_process_group()  # whose connections are closed
            place = folder / key.replace(" ", "-")
            dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=RANKS)
    return found


def diverging_without_tags() -> str:
    """After a rank was late, in two engines whose paths differ."""
    rank = dist.get_rank()
    for order in ((0, 1, 2, 3), (2, 1, 0, 3)):
        engine = engine_of("GGG", prefetch=False)
        model: Any = engine.model
        model.order = order
        step(engine)
        model.seconds = LATE_S if rank == 1 else 0.0
        step(engine)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DivergedError) as raised:
        patch.setattr(Trail, "tag", 1)  # as with NCCL, where messages of different collectives meet
        model.order = (0, 1, 3) if rank == 1 else (0, 2, 3)
        step(engine)
    return str(raised.value)


def left_waiting() -> tuple[str, str]:
    """What rank 0 says, whose collective rank 1 has ended; and what a receive from rank 2 says then, which lives on."""
    rank, said = dist.get_rank(), ("", "")
    trail, received = Trail(rank, RANKS), torch.zeros(1)
    world: Any = dist.group.WORLD
    store = world.get_group_store()
    if rank == 1:
        with trail.at("second"):
            trail.difference()
        trail.disconnect()
    if rank == 0:
        waiting: Any = dist.irecv(received, 2, tag=1)
        with pytest.raises(DivergedError) as diverged, trail.at("first"):
            dist.recv(received, 1, tag=1)
        with pytest.raises(RuntimeError) as failed:
            waiting.wait(timedelta(seconds=30))
        said = str(diverged.value), str(failed.value)
    store.set(f"over-{rank}", "")
    store.wait(["over-0"])
    return said


def endless(limit: int) -> int:
    """How many collectives a rank remembers that never steps."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(divergence, "_MAX_KEPT", limit)
        engine = engine_of("GGG", prefetch=False)
        for _ in range(limit):
            engine(torch.ones(2, 8))
    assert sum(count.calls for count in engine.collectives.counts.values()) == 4 * limit
    return len(engine.collectives.trail._recent)


def test_ranks_that_diverge_fail_in_that_step_and_name_units_and_ranks(tmp_path: Path) -> None:
    for found in on_ranks(RANKS, diverging, tmp_path, folder=tmp_path):
        assert len(found) == 2 * len(WAYS) + 1
        for way, said in found.items():
            assert "rank 1 was at the " in said and "of layers." in said, (way, said)


def test_a_rank_that_diverged_leaves_none_waiting(tmp_path: Path) -> None:
    diverged, failed = on_ranks(RANKS, left_waiting, folder=tmp_path)[0]
    assert "rank 0 was at the first, where rank 1 was at the second;" in diverged
    assert "pair closure" in failed


def test_a_difference_is_that_of_ranks_that_have_not_come_so_far() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trails = [Trail(rank, 3) for rank in range(3)]
        for trail, names in zip(trails, ("ab", "ac", "a"), strict=True):
            for name in names:
                with trail.at(name):
                    pass
        assert trails[2].difference() == trails[0].difference() == ""
        said = [trails[rank].difference() for rank in (1, 0, 2)]
    finally:
        dist.destroy_process_group()
    assert len({*said}) == 1 and "rank 0 was at the b, where rank 1 was at the c;" in said[0]
    assert trails[0].difference() == ""


def test_a_rank_that_never_steps_remembers_its_last_collectives_only(tmp_path: Path) -> None:
    assert on_ranks(RANKS, endless, 5, folder=tmp_path) == [5] * RANKS
