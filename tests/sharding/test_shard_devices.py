"""Devices of a client's ranks: one GPU each over NCCL, or shared ones over gloo."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from clients.sharding.process import agreed_backend
from clients.sharding.ranks import place_of
from fedsign.sharding.section import ShardingSection


@pytest.mark.parametrize(
    ("device", "num_gpus", "has_nccl", "expected"),
    [
        ("cpu", 0, False, [("cpu", "gloo")] * 3),
        ("cpu", 8, True, [("cpu", "gloo")] * 3),
        ("cuda", 3, True, [("cuda:0", "nccl"), ("cuda:1", "nccl"), ("cuda:2", "nccl")]),
        ("cuda", 8, True, [("cuda:0", "nccl"), ("cuda:1", "nccl"), ("cuda:2", "nccl")]),
        ("cuda", 3, False, [("cuda:0", "gloo"), ("cuda:1", "gloo"), ("cuda:2", "gloo")]),
        ("cuda", 2, True, [("cuda:0", "gloo"), ("cuda:1", "gloo"), ("cuda:0", "gloo")]),
        ("cuda", 1, True, [("cuda:0", "gloo")] * 3),
        ("cuda:1", 8, True, [("cuda:1", "gloo")] * 3),
    ],
)
def test_ranks_have_a_gpu_each_or_share(
    device: str, num_gpus: int, has_nccl: bool, expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    sharding = ShardingSection(ranks=3)
    assert [place_of(torch.device(device), rank=rank, sharding=sharding) for rank in range(3)] == expected


def test_of_several_machines_each_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six ranks on two machines with three GPUs each: ranks 3 to 5 have those of the second one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    sharding = ShardingSection(ranks=6, machines=2)
    found = [place_of(torch.device("cuda"), rank=rank, sharding=sharding)[0] for rank in range(6)]
    assert found == ["cuda:0", "cuda:1", "cuda:2"] * 2


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [(("nccl", "nccl"), "nccl"), (("gloo", "gloo"), "gloo"), (("nccl", "gloo"), "gloo"), (("gloo", "nccl"), "gloo")],
)
def test_ranks_agree_on_a_backend(wishes: tuple[str, str], expected: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(len(wishes)) as pool:
        found = pool.map(lambda rank: agreed_backend(store, wishes[rank], rank=rank, ranks=len(wishes)), range(2))
        assert [*found] == [expected] * 2
