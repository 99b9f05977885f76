"""PaRO on a two-level network: two machines of two ranks with a slow cable, compared with torch's own strategies.

The network is `benchmarks.alone.shaped`'s.  All competitors take the same steps of the same model in turn: two matrices
of a million float32 weights, AdamW, 4 micro-batches of 4 rows, so that there is almost no computation. Each is checked
against one process on all batches.

Results include the plan's prediction: `fedsign.sharding.plan` with the bandwidths that ranks measure inside a
collective (`fedsign.sharding.probe`; headers take 5 % of the cable's). The bandwidth across the cable is shared by a
machine's ranks. The measured computation is added, since nothing is prefetched here (see
`benchmarks.alone.paro_prefetch`).
"""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.alone.paro_competitors import COMPETITORS, LAYERS, PER_GROUP, WIDTH
from benchmarks.alone.shaped import Cable, cable
from benchmarks.docs_alone import COMPARED, UNSHAPED
from benchmarks.machine import machine
from benchmarks.measure import Result, dispersion, result_head, write_result
from fedsign.errors import EngineError
from fedsign.sharding.layout import Grouping
from fedsign.sharding.plan import StateBytes, Task, estimate
from fedsign.sharding.strategy import STRATEGIES
from fedsign.sharding.traffic import Link, Network, Rings

NAME = "paro_network"
RANKS, ACCUMULATE = 4, 4
MEGABITS = (None, 200, 100)  # None: the cable is not shaped
SIZES = StateBytes(param=4, gradient=4, state=8)
_TIMEOUT_S = 1500.0


def predicted(competitor: str, *, across_bps: float, within_bps: float, computing_s: float) -> dict[str, float] | None:
    """Return the plan's seconds and bytes of memory; None for competitors other than PaRO."""
    name, _, rings = competitor.partition(" ")
    if name not in STRATEGIES:
        return None
    network = Network(
        intra_bps=within_bps,
        inter_bps=across_bps,
        link=Link.GROUP,
        rings=Rings.FLAT if rings == "flat" else Rings.TWO_LEVEL,
    )
    size = float(LAYERS * WIDTH * WIDTH)
    task = Task(params=size, trainable=size, accumulate=ACCUMULATE, sizes=SIZES)
    grouping = Grouping.of(ranks=RANKS, per_group=PER_GROUP)
    found = estimate(STRATEGIES[name], task, grouping=grouping, network=network)
    return {"seconds": found.communication_s + computing_s, "kept_bytes": found.memory_bytes}


def on_network(net: Cable, megabits: float | None, competitors: list[str], repetitions: int) -> Result:
    """Measure all competitors at one bandwidth; None leaves the cable as it is."""
    if megabits is not None:
        net.shape(megabits)
    given = {"accumulate": ACCUMULATE, "repetitions": repetitions, "competitors": competitors}
    return _summed_up(on_machines(net, "benchmarks.alone.paro_rank", given))


def on_machines(net: Cable, module: str, given: Result) -> list[Result]:
    """Run a module as four ranks, two per machine; return what each wrote to `rank-N.json` in its folder."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        settings = Path(folder) / "settings.json"
        rank_settings = {**given, "address": net.address(0), "port": _free_port(), "ranks": RANKS, "folder": folder}
        settings.write_text(json.dumps(rank_settings), encoding="utf-8")
        ranks = []
        for rank in range(RANKS):
            command = net.inside(rank // PER_GROUP, [sys.executable, "-m", module, str(settings), str(rank)])
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env=environment))
            stack.callback(_end, ranks[-1])
        _wait(ranks)
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


def _summed_up(found: list[dict[str, Any]]) -> Result:
    """Combine ranks: the slowest rank's seconds, the bytes at both ends of the cable, the largest kept memory."""
    within_bps, across_bps = found[0]["within_bps"], found[0]["across_bps"]  # the same on all ranks
    computing_s = max(rank["computing_s"] for rank in found)
    competitors: Result = {}
    for name in found[0]["competitors"]:
        turns = list(zip(*(rank["competitors"][name] for rank in found), strict=True))
        seconds = [max(rank["seconds"] for rank in turn) for turn in turns]
        expected = predicted(name, across_bps=across_bps, within_bps=within_bps, computing_s=computing_s)
        competitors[name] = {
            "seconds": dispersion(seconds),
            "all_seconds": seconds,
            "cable_bytes": median(turn[0]["cable_bytes"] + turn[PER_GROUP]["cable_bytes"] for turn in turns),
            "kept_bytes": max(rank["kept_bytes"] for turn in turns for rank in turn),
            "error": max(rank["error"] for turn in turns for rank in turn),
            **(
                {"predicted": expected, "predicted_over_measured": expected["seconds"] / median(seconds)}
                if expected
                else {}
            ),
        }
    return {
        "within_bps": within_bps,
        "across_bps": across_bps,
        "computing_s": computing_s,
        "competitors": competitors,
        "ratios": [_ratio(competitors, slow, fast) for slow, fast, _ in COMPARED if {slow, fast} <= competitors.keys()],
    }


def _ratio(competitors: Result, slow: str, fast: str) -> dict[str, float]:
    pairs = zip(competitors[slow]["all_seconds"], competitors[fast]["all_seconds"], strict=True)
    return dispersion([one / other for one, other in pairs])


def measure(path: Path, *, repetitions: int, competitors: list[str] | None = None) -> None:
    """Measure all competitors without a limit, and at both bandwidths.

    Raises:
        EngineError: network namespaces cannot be created here, or a rank ended.
    """
    before = machine()
    with cable() as net:
        rates = {
            str(megabits or UNSHAPED): on_network(net, megabits, competitors or list(COMPETITORS), repetitions)
            for megabits in MEGABITS
        }
    result = {
        **result_head(NAME, "A two-level network", before, repetitions),
        "ranks": RANKS, "per_group": PER_GROUP, "accumulate": ACCUMULATE, "params": LAYERS * WIDTH * WIDTH,
        "rates": rates,
    }  # fmt: skip
    write_result(path, result)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def _wait(ranks: "list[subprocess.Popen[bytes]]") -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        codes = [rank.poll() for rank in ranks]
        ended = [number for number, code in enumerate(codes) if code]
        if ended or time.monotonic() > deadline:
            raise EngineError(f"rank {ended[0]} ended; what it said is above." if ended else "the ranks took too long.")
        if None not in codes:
            return
        time.sleep(0.2)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
