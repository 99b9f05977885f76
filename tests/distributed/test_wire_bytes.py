"""Traffic over a cable between two machines equals the plan, by the kernel's own counters.

Two machines (network namespaces) of two ranks each, with an unshaped cable.  Each machine counts what it sends in some
steps.  A counted segment is what TCP passes to the device (up to 64 KB, which a real card would cut into packets), with
66 bytes of headers: Ethernet 14, IPv4 20, TCP 20 with 12 of timestamps.  The rest is TCP payload: every planned byte,
gloo's header of each message, and two barriers, at most 2 %.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.alone.paro_competitors import LAYERS, PER_GROUP, WIDTH
from benchmarks.alone.shaped import DEVICE, Cable, cable
from fedsign.errors import EngineError
from fedsign.sharding.account import Flat, step_counts
from fedsign.sharding.layout import Grouping
from fedsign.sharding.strategy import strategy_of
from fedsign.sharding.traffic import Rings
from tests.e2e.namespaces import why_not

pytestmark = pytest.mark.slow

RANKS, ACCUMULATE, STEPS = 4, 2, 3
HEADERS = 14 + 20 + 32
MORE = 1.02
COMPETITORS = ("NNN", "NNN flat", "NGG flat", "GGG flat", "GGG", "IIG", "NII", "NIG", "III")


@pytest.fixture
def net() -> Iterator[Cable]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    try:
        with cable() as made:
            yield made
    except EngineError as error:
        pytest.skip(f"no cable can be laid here: {error}")


def planned(competitor: str, host: int) -> int:
    """Bytes that a machine's ranks send to the other one in all steps."""
    name, _, rings = competitor.partition(" ")
    flats = [Flat(numel=WIDTH * WIDTH, itemsize=4, gradient_itemsize=4, num_params=1, is_trainable=True)] * LAYERS
    total = 0
    for rank in range(host * PER_GROUP, (host + 1) * PER_GROUP):
        counts = step_counts(
            strategy_of(name),
            flats,
            accumulate=ACCUMULATE,
            grouping=Grouping.of(ranks=RANKS, per_group=PER_GROUP),
            rank=rank,
            rings=Rings.FLAT if rings else Rings.TWO_LEVEL,
        )
        total += STEPS * sum(count.inter_bytes for count in counts.values())
    return total


def counted(net: Cable, folder: Path) -> list[dict[str, list[int]]]:
    """Of each machine: bytes and segments of every competitor."""
    settings = folder / "settings.json"
    given = {
        "meeting": f"file://{folder}/meeting",
        "ranks": RANKS,
        "accumulate": ACCUMULATE,
        "steps": STEPS,
        "competitors": COMPETITORS,
    }
    settings.write_text(json.dumps(given), encoding="utf-8")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        ranks = []
        for rank in range(RANKS):
            command = [sys.executable, "-m", "tests.distributed.wired", str(settings), str(rank)]
            ranks.append(subprocess.Popen(net.inside(rank // PER_GROUP, command), env=environment))
            stack.callback(_end, ranks[-1])
        deadline = time.monotonic() + 300
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            assert not any(rank.returncode for rank in ranks), "a rank has ended; what it said is above"
            time.sleep(0.1)
        assert [rank.poll() for rank in ranks] == [0] * RANKS
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in (0, PER_GROUP)]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def ratios(net: Cable, folder: Path) -> dict[tuple[str, int], float]:
    """Payload bytes that the kernel counted over the planned ones, of every competitor and machine."""
    folder.mkdir()
    return {
        (competitor, host): (num_bytes - HEADERS * num_segments) / planned(competitor, host)
        for host, competitors in enumerate(counted(net, folder))
        for competitor, (num_bytes, num_segments) in competitors.items()
    }


def test_the_kernel_counts_the_planned_bytes_and_two_percent_at_most_besides(net: Cable, tmp_path: Path) -> None:
    """Where the machine is busy TCP sends segments twice, now and then: of three tries the least counts."""
    least = ratios(net, tmp_path / "0")
    for again in ("1", "2"):
        if max(least.values()) > MORE:
            least = {case: min(least[case], ratio) for case, ratio in ratios(net, tmp_path / again).items()}
    assert all(1 <= ratio <= MORE for ratio in least.values()), least
