"""A rank of `benchmarks.alone.paro_network`: runs every competitor in turn, repeatedly, and reports measurements.

    python -m benchmarks.alone.paro_rank SETTINGS.json RANK

Each run is two steps after a warm-up step; a barrier separates runs.  Rank 0, and the first rank of the other
machine, read the byte counters of their end of the cable.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.alone.paro_competitors import COMPETITORS, PER_GROUP, WIDTH, Competitor, adamw, loss_of, make_model
from benchmarks.alone.shaped import DEVICE, sent
from fedsign.sharding.layout import Grouping
from fedsign.sharding.probe import probe

ROWS, STEPS = 4, 2


def batches(rank: int, accumulate: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's micro-batches, the same in every step."""
    draws = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(ROWS, WIDTH, generator=draws), torch.randn(ROWS, WIDTH, generator=draws))
        for _ in range(accumulate)
    ]


def take_step(competitor: Competitor, own: list[tuple[Tensor, Tensor]]) -> None:
    """Take one step."""
    for number, (features, targets) in enumerate(own, start=1):
        competitor.micro_batch(features, targets, 1 / len(own), is_last=number == len(own))
    competitor.step()


def alone(ranks: int, accumulate: int) -> list[Tensor]:
    """Return the reference parameters: the same number of steps in one process, on the batches of all ranks."""
    model = make_model()
    optimizer = adamw(model.parameters())
    every = [batch for rank in range(ranks) for batch in batches(rank, accumulate)]
    for _ in range(STEPS + 1):
        for features, targets in every:
            (loss_of(model(features), targets) / len(every)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def measure_one(name: str, rank: int, accumulate: int, expected: list[Tensor]) -> dict[str, Any]:
    """Run one competitor; return seconds, bytes through the cable, kept memory, and the distance to the reference."""
    competitor = COMPETITORS[name]()
    own = batches(rank, accumulate)
    take_step(competitor, own)
    dist.barrier()
    before, began = sent(), time.perf_counter()
    for _ in range(STEPS):
        take_step(competitor, own)
    dist.barrier()
    seconds, cable_bytes = (time.perf_counter() - began) / STEPS, sent().since(before).num_bytes // STEPS
    first = make_model().state_dict().values()
    moved = sum(float((one - other).square().sum()) for one, other in zip(expected, first, strict=True)) ** 0.5
    found = competitor.parameters()
    away = sum(float((one - other).square().sum()) for one, other in zip(found, expected, strict=True)) ** 0.5
    for features, targets in own:  # with gradients, when kept memory is largest
        competitor.micro_batch(features, targets, 1 / accumulate, is_last=False)
    return {
        "seconds": seconds,
        "cable_bytes": cable_bytes,
        "kept_bytes": competitor.kept_bytes(),
        "error": away / moved,
    }


def computing_s(rank: int, accumulate: int) -> float:
    """Time a step without communication, on all ranks at once, each with the whole model and its optimizer."""
    model = make_model()
    optimizer = adamw(model.parameters())
    taken = []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        for features, targets in batches(rank, accumulate):
            (loss_of(model(features), targets) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


def main(path: Path, rank: int) -> None:
    """Run a rank."""
    given = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{given['address']}:{given['port']}", rank=rank, world_size=given["ranks"]
    )
    expected = alone(given["ranks"], given["accumulate"])
    measured = probe(Grouping.of(ranks=given["ranks"], per_group=PER_GROUP))
    result: dict[str, Any] = {
        "within_bps": measured.intra_bps,
        "across_bps": measured.inter_bps,
        "computing_s": computing_s(rank, given["accumulate"]),
        "competitors": {name: [] for name in given["competitors"]},
    }
    for repetition in range(given["repetitions"]):
        for name in given["competitors"]:
            found = measure_one(name, rank, given["accumulate"], expected)
            result["competitors"][name].append(found)
            if rank == 0:
                print(f"repetition {repetition + 1}: {name}: {found['seconds']:.2f} s a step", flush=True)
    (Path(given["folder"]) / f"rank-{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", DEVICE)
    main(Path(sys.argv[1]), int(sys.argv[2]))
