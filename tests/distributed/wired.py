"""A rank on one of two machines joined by a cable, for tests of its traffic.

python -m tests.distributed.wired SETTINGS.json RANK
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.alone.paro_competitors import COMPETITORS
from benchmarks.alone.paro_rank import batches, take_step
from benchmarks.alone.shaped import sent


def crossed(competitor: str, *, rank: int, accumulate: int, steps: int) -> list[int]:
    """Bytes and segments that this rank's machine sends in so many steps, after one that opens all connections."""
    made, own = COMPETITORS[competitor](), batches(rank, accumulate)
    take_step(made, own)
    dist.barrier()
    before = sent()
    dist.barrier()  # nobody begins before all have read
    for _ in range(steps):
        take_step(made, own)
    dist.barrier()
    return list(sent().since(before))


def main(path: Path, rank: int) -> None:
    """Each competitor in turn; what was counted goes to a file."""
    given = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=given["meeting"], rank=rank, world_size=given["ranks"])
    found = {
        competitor: crossed(competitor, rank=rank, accumulate=given["accumulate"], steps=given["steps"])
        for competitor in given["competitors"]
    }
    path.with_name(f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
