"""Run a function on several ranks: processes with their own gloo group, whose results come back as files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing


def on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, folder: Path, backend: str = "gloo"
) -> list[Any]:
    """Call a module's function once on each rank; its results in the order of the ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    # one process imports torch for all: spawned ones would spend more time on that than on the tests
    multiprocessing.set_forkserver_preload(["tests.distributed.resuming", function.__module__])
    given = (ranks, function, arguments, folder, backend)
    multiprocessing.start_processes(_on_rank, args=given, nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _on_rank(
    rank: int, ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...], folder: Path, backend: str
) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    dist.barrier()  # a rank that has ended is gone from those that still connect
    try:
        torch.save(function(*arguments), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
