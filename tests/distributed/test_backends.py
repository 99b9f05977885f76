"""Through host memory, as gloo sends GPU tensors: the same bits and bytes; on real GPUs, if there are any."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fedsign.sharding.collectives import Collectives, backend_of
from fedsign.sharding.layout import Cut, Grouping
from fedsign.sharding.strategy import STRATEGIES, Collective
from fedsign.sharding.traffic import Rings, planned
from tests.distributed.ranks import on_ranks
from tests.distributed.test_collectives import KINDS, is_right
from tests.distributed.training import Case, Outcome, all_sharded, alone

pytestmark = pytest.mark.slow

SHAPES = ((2, 2), (1, 4), (4, 1))
NUMEL = 1001


class Watched(Collectives):
    """Notes what was handed to the rings."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.went: list[int] = []

    def _run(self, collective: Collective, tensor: Tensor) -> None:
        self.went.append(tensor.data_ptr())
        super()._run(collective, tensor)


def all_through_host() -> list[Any]:
    found = []
    for shape, rings, kind, dtype in product(SHAPES, Rings, KINDS, (torch.float64, torch.bfloat16)):
        collectives = Collectives(Grouping(groups=shape[0], per_group=shape[1]), rings=rings, through_host=True)
        right = is_right(collectives, kind, NUMEL, dtype)
        found.append((shape, rings, kind, dtype, right, replace(collectives.counts[kind], elapsed_s=0.0)))
    return found


def whose_memory_travels() -> list[bool]:
    tensor, found = torch.zeros(4), []
    for through_host in (None, True):
        collectives = Watched(Grouping(groups=2, per_group=2), through_host=through_host)
        collectives.run(KINDS[0], tensor)
        found.append(collectives.went == [tensor.data_ptr()])
    return [*found, backend_of("cpu") == backend_of("cuda") == "gloo"]


def test_collectives_through_the_host_give_the_same_and_send_what_is_planned(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(4, all_through_host, folder=tmp_path)):
        assert len(found) == len(SHAPES) * 2 * len(KINDS) * 2
        for shape, rings, kind, dtype, right, sent in found:
            grouping = Grouping(groups=shape[0], per_group=shape[1])
            block_bytes = Cut(numel=NUMEL, grouping=grouping).block * dtype.itemsize
            expected = planned(kind, rank=rank, block_bytes=block_bytes, grouping=grouping, rings=rings)
            assert right and sent == expected, (rank, shape, rings, str(kind), dtype)


def test_what_travels_through_the_host_is_a_copy(tmp_path: Path) -> None:
    assert on_ranks(4, whose_memory_travels, folder=tmp_path) == [[True, False, True]] * 4


def trained(strategies: list[str], device: str, through_host: bool | None) -> list[Outcome]:
    common = Case(strategy="", accumulate=2, clip_norm=0.3, checkpoints="new", freezes=True, masks=True)
    return all_sharded(
        [replace(common, strategy=name, device=device, through_host=through_host) for name in strategies]
    )


def test_the_engine_gives_the_same_bits_through_the_host(tmp_path: Path) -> None:
    names = ["GGG", "IIG", "NII", "NNN"]
    direct = on_ranks(4, trained, names, "cpu", None, folder=tmp_path / "direct")
    through_host = on_ranks(4, trained, names, "cpu", True, folder=tmp_path / "host")
    for one, other in zip(direct, through_host, strict=True):
        for plain, copied in zip(one, other, strict=True):
            assert plain.norms == copied.norms
            assert all(torch.equal(plain.values[name], value) for name, value in copied.values.items())
            sent = [
                {each: replace(count, elapsed_s=0.0) for each, count in outcome.done.items()}
                for outcome in (plain, copied)
            ]
            assert sent[0] == sent[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_on_gpus_take_the_steps_of_one_process_on_the_cpu(backend: str, tmp_path: Path) -> None:
    """Over gloo they share a GPU; over NCCL each has one of its own."""
    if backend == "nccl" and (not dist.is_nccl_available() or torch.cuda.device_count() < 4):
        pytest.skip("NCCL needs a GPU for each of 4 ranks")
    names = list(STRATEGIES)
    found = on_ranks(4, trained, names, "cuda", None, folder=tmp_path, backend=backend)
    case = Case(strategy="NNN", accumulate=2, clip_norm=0.3, checkpoints="new", freezes=True, masks=True)
    values, norms = alone(case)
    for outcomes in found:
        for name, outcome in zip(names, outcomes, strict=True):
            assert outcome.norms == pytest.approx(norms, abs=1e-12), name
            for key, value in values.items():
                torch.testing.assert_close(outcome.values[key], value, rtol=0, atol=1e-12)
