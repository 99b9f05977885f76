"""Memory and time of hypergradients by training depth.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 3: reverse unrolling keeps the whole training, (FG)²U one state and
b tangents.  Digits condensed to one image per class with an MLP of 64 units, b = 10. Measured are the live bytes that
one hypergradient allocates, at their peak, by a torch dispatch mode. Seconds of one hypergradient are only plotted.

Beyond the claim: the depth from which (FG)²U takes less memory.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fedsign.bilevel.condense import Condensation
from fedsign.bilevel.settings import from_dict
from fedsign.memory.live import LiveBytes
from fedsign.report.chart import Axis, Chart, Series
from fedsign.report.figures import draw, write
from fedsign.seeding import Purpose, torch_generator
from simulations.recipes.base import Shown, Verdict, at_least, part, recipe, within

METHODS: dict[str, Mapping[str, Any]] = {
    "rgu": {},
    "trgu": {"truncated_steps": 10},
    "hessian_free": {},
    "neumann": {},
    "fg2u": {"num_directions": 10},
}
DEPTHS, _QUICK_DEPTHS = (10, 20, 30, 50, 100, 200, 500, 1000), (10, 30, 50, 200)
PICTURE = Path("fg2u-memory.svg")


def hypergradient(method: str, depth: int) -> Callable[[], object]:
    """Prepare a hypergradient that can be taken repeatedly, with data, network and batches in place."""
    settings = {"name": method, **METHODS[method]}
    made = Condensation(from_dict({"inner": {"depth": depth}, "outer": {"batch_size": 256}, "method": settings}))
    meta, found = made.begin().meta, made.config.method.build()

    problem = made.problem(meta, torch_generator(0, Purpose.CONDENSATION, round=1))

    def take() -> object:
        return found(problem, meta, generator=torch_generator(0, Purpose.CONDENSATION, round=2))

    take()
    return take


def peak_bytes(take: Callable[[], object]) -> int:
    """Return the peak of the live bytes that a hypergradient allocates."""
    live = LiveBytes()
    with live:
        take()
    return live.peak.total_bytes


@recipe(
    "The memory of (FG)²U is the same at depth 10 and 200; that of reverse unrolling grows at least eightfold.",
    part("the memory of (FG)²U does not grow with the depth", within(1.0, 0.01, "fg2u_growth")),
    part("the memory of reverse unrolling grows at least eightfold from 10 to 200 steps", at_least(8.0, "rgu_growth")),
    source="(FG)²U, section 3",
    null={"fg2u_growth": 8.0, "rgu_growth": 1.0},  # exchanged
    expected=Verdict.HOLDS,
)
def fg2u_memory(quick: bool) -> Shown:
    """Return bytes at each depth (quick: four), their growth from 10 to 200, and the depth where the methods cross."""
    depths = _QUICK_DEPTHS if quick else DEPTHS
    sizes: dict[tuple[str, int], int] = {}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for method, depth in product(METHODS, depths):
        take = hypergradient(method, depth)
        began = time.perf_counter()
        take()
        # apart from the timed call: the dispatch mode slows every operator down
        sizes[method, depth] = peak_bytes(take)
        seconds[method].append(time.perf_counter() - began)
    megabytes = {method: [sizes[method, depth] / 1e6 for depth in depths] for method in METHODS}
    write(lambda: draw(*depth_charts(depths, megabytes, seconds), height=2.5), PICTURE)
    metrics: dict[str, float] = {f"{method}_{depth}_bytes": size for (method, depth), size in sizes.items()}
    metrics |= {f"{method}_growth": sizes[method, 200] / sizes[method, 10] for method in METHODS}
    low, high = depths[0], depths[-1]  # bytes of reverse unrolling are linear in the depth
    first, last = sizes["rgu", low], sizes["rgu", high]
    metrics["crossing_depth"] = low + (sizes["fg2u", low] - first) * (high - low) / (last - first)
    return metrics, PICTURE


def depth_charts(
    depths: Sequence[int], megabytes: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]
) -> list[Chart]:
    """Plot on two logarithmic axes: growth with depth is a slope, constant cost a level line."""
    x, charts = Axis(label="steps of the training", scale="log"), []
    for title, lines in (("peak, MB", megabytes), ("time, s", seconds)):
        series = [Series(name=name, x=depths, y=lines[name], marker="o", color=at) for at, name in enumerate(lines)]
        charts.append(Chart(title=title, series=series, x=x, y=Axis(label=title, scale="log")))
    return charts
