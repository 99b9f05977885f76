"""Where a client's ranks compute: one GPU each over NCCL, or shared ones over gloo."""

import threading

import pytest
import torch
import torch.distributed as dist

from clients.shard_devices import Place, agreed_backend, place_here, place_of


def places(device: str, *, ranks: int, num_gpus: int, has_nccl: bool = True) -> list[tuple[str, str]]:
    found = [
        place_of(torch.device(device), rank=rank, ranks=ranks, num_gpus=num_gpus, has_nccl=has_nccl)
        for rank in range(ranks)
    ]
    return [(each.device, each.backend) for each in found]


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
    device: str, num_gpus: int, has_nccl: bool, expected: list[tuple[str, str]]
) -> None:
    assert places(device, ranks=3, num_gpus=num_gpus, has_nccl=has_nccl) == expected


def test_on_this_machine_a_cpu_is_a_cpu() -> None:
    assert place_here(torch.device("cpu"), rank=1, ranks=2).backend == "gloo"


@pytest.mark.parametrize(
    ("wanted", "agreed"), [(["nccl", "nccl"], "nccl"), (["nccl", "gloo"], "gloo"), (["gloo", "gloo"], "gloo")]
)
def test_ranks_on_machines_that_differ_agree_on_one_backend(wanted: list[str], agreed: str) -> None:
    store, found = dist.HashStore(), {}

    def say(rank: int) -> None:
        place = Place(device="cuda:0", backend=wanted[rank])
        found[rank] = agreed_backend(place, store, rank=rank, ranks=2)

    other = threading.Thread(target=say, args=(1,))
    other.start()
    say(0)
    other.join()
    assert found == {0: agreed, 1: agreed}
