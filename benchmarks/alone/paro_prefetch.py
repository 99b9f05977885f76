"""PaRO with and without prefetching, where computation and communication take about equally long.

    python -m benchmarks.alone.paro_prefetch SETTINGS.json RANK  (started by `make bench WORKLOADS=paro_prefetch`)

The network is `benchmarks.alone.paro_network`'s. The model is a stack of matrices in units of 2.4 MB, whose blocks are
larger than the bucket's burst.  Each strategy takes the same steps with and without prefetching, in turn, and both end
with the same bits.  Four ranks share this machine's cores, so a step's computation is measured, too.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.alone.paro_competitors import PER_GROUP, adamw, loss_of
from benchmarks.alone.paro_network import RANKS, on_machines
from benchmarks.alone.shaped import DEVICE, cable
from benchmarks.machine import machine
from benchmarks.measure import Result, dispersion, result_head, write_result
from fedsign.sharding.layout import Grouping
from fedsign.sharding.paro import Sharded
from fedsign.sharding.traffic import Rings

NAME = "paro_prefetch"
MEGABITS = (200, 1000)
COMPETITORS = ("GGG", "GGG flat", "GIG", "IGG", "IIG", "III", "NGG", "NII")
WIDTH, LAYERS, ROWS, ACCUMULATE, STEPS = 768, 6, 256, 2, 2


def make_model() -> nn.Sequential:
    """Make the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's micro-batches, the same in every step."""
    draws = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(ROWS, WIDTH, generator=draws), torch.randn(ROWS, WIDTH, generator=draws))
        for _ in range(ACCUMULATE)
    ]


def engine(competitor: str, *, prefetch: bool) -> Sharded:
    """Return one way to train."""
    strategy, _, rings = competitor.partition(" ")
    return Sharded(
        make_model(),
        lambda named: torch.optim.AdamW(named, lr=1e-3),
        grouping=Grouping.of(ranks=dist.get_world_size(), per_group=PER_GROUP),
        strategy=strategy,
        rings=Rings.FLAT if rings else Rings.TWO_LEVEL,
        prefetch=prefetch,
    )


def take_step(sharded: Sharded, own: list[tuple[Tensor, Tensor]]) -> None:
    """Take one step."""
    for features, targets in own:
        (loss_of(sharded(features), targets) / len(own)).backward()
    sharded.step()


def measure_one(competitor: str, rank: int, *, prefetch: bool) -> tuple[float, dict[str, Tensor]]:
    """Return seconds per step, after a warm-up step that also records the order of units, and the final parameters."""
    sharded, own = engine(competitor, prefetch=prefetch), batches(rank)
    take_step(sharded, own)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        take_step(sharded, own)
    dist.barrier()
    return (time.perf_counter() - began) / STEPS, sharded.full_state_dict()


def computing_s(rank: int) -> float:
    """Time a step without any communication, on all ranks at once."""
    model = make_model()
    optimizer, taken = adamw(model.parameters()), []
    for _ in range(3):
        dist.barrier()
        began = time.perf_counter()
        for features, targets in batches(rank):
            (loss_of(model(features), targets) / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[1]


def main(path: Path, rank: int) -> None:
    """Run a rank, with and without prefetching in turn, in alternating order."""
    given = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{given['address']}:{given['port']}", rank=rank, world_size=given["ranks"]
    )
    result: dict[str, Any] = {
        "computing_s": computing_s(rank),
        "competitors": {name: [] for name in given["competitors"]},
    }
    for repetition in range(given["repetitions"]):
        for name in given["competitors"]:
            turns = [bool(repetition % 2), not repetition % 2]
            found = {prefetch: measure_one(name, rank, prefetch=prefetch) for prefetch in turns}
            is_same = all(torch.equal(value, found[False][1][key]) for key, value in found[True][1].items())
            result["competitors"][name].append({"off": found[False][0], "on": found[True][0], "is_same": is_same})
            if rank == 0:
                print(
                    f"repetition {repetition + 1}: {name}: {found[False][0]:.2f} s, {found[True][0]:.2f} s", flush=True
                )
    (Path(given["folder"]) / f"rank-{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def _summed_up(found: list[Result]) -> Result:
    """Combine ranks: the slowest rank's seconds, and ratios of adjacent measurements."""
    competitors: Result = {}
    for name in found[0]["competitors"]:
        turns = list(zip(*(rank["competitors"][name] for rank in found), strict=True))
        seconds = {key: [max(rank[key] for rank in turn) for turn in turns] for key in ("off", "on")}
        competitors[name] = {
            **{key: dispersion(each) for key, each in seconds.items()},
            "off_over_on": dispersion([off / on for off, on in zip(seconds["off"], seconds["on"], strict=True)]),
            "is_same": all(rank["is_same"] for turn in turns for rank in turn),
        }
    return {"computing_s": max(rank["computing_s"] for rank in found), "competitors": competitors}


def measure(
    path: Path, *, repetitions: int, competitors: tuple[str, ...] = COMPETITORS, megabits: tuple[int, ...] = MEGABITS
) -> None:
    """Measure all competitors at all bandwidths.

    Raises:
        EngineError: network namespaces cannot be created here, or a rank ended.
    """
    before, rates = machine(), {}
    with cable() as net:
        for rate in megabits:
            net.shape(rate)
            given = {"repetitions": repetitions, "competitors": list(competitors)}
            rates[str(rate)] = _summed_up(on_machines(net, "benchmarks.alone.paro_prefetch", given))
    result = {
        **result_head(NAME, "Sharded, ahead of time", before, repetitions),
        "ranks": RANKS,
        "per_group": PER_GROUP,
        "accumulate": ACCUMULATE,
        "batch_rows": ROWS,
        "params": LAYERS * WIDTH * WIDTH,
        "rates": rates,
    }
    write_result(path, result)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", DEVICE)
    main(Path(sys.argv[1]), int(sys.argv[2]))
