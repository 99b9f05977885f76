"""Memory and time of hypergradients by the depth of the training.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 3: reverse unrolling keeps the whole training, (FG)²U one state and b tangents.  Digits
condensed to one image of each class with an MLP of 64 units, b = 10; live bytes at the peak of one hypergradient, of what it makes
itself, by torch's dispatcher.  Seconds are of one hypergradient each and go into the picture alone.

Beyond the claim: the depth from which on (FG)²U is the smaller one.
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
from simulations.recipes.base import Shown, at_least, recipe, within

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
    """One to be taken, again and again the same; data, network and batches are made."""
    said = {"name": method, **METHODS[method]}
    made = Condensation(from_dict({"inner": {"depth": depth}, "outer": {"batch_size": 256}, "method": said}))
    meta, found = made.begin().meta, made.config.method.build()

    problem = made.problem(meta, torch_generator(0, Purpose.CONDENSATION, round=1))

    def take() -> object:
        return found(problem, meta, generator=torch_generator(0, Purpose.CONDENSATION, round=2))

    take()
    return take


def peak_bytes(take: Callable[[], object]) -> int:
    """Live bytes at the peak of what a hypergradient makes itself."""
    live = LiveBytes()
    with live:
        take()
    return live.peak.total_bytes


@recipe(
    "The memory of (FG)²U is the same at depth 10 and 200; that of reverse unrolling grows at least eightfold.",
    within(1.0, 0.01, "fg2u_growth"),
    at_least(8.0, "rgu_growth"),
)
def fg2u_memory(quick: bool) -> Shown:
    """Bytes at each depth, their growth from 10 to 200, and where reverse unrolling and (FG)²U cross (quick: four depths)."""
    depths = _QUICK_DEPTHS if quick else DEPTHS
    sizes: dict[str, dict[int, int]] = {method: {} for method in METHODS}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for method, depth in product(METHODS, depths):
        take = hypergradient(method, depth)
        began = time.perf_counter()
        take()
        sizes[method][depth] = peak_bytes(take)
        seconds[method].append(time.perf_counter() - began)
    megabytes = {method: [size / 1e6 for size in by_depth.values()] for method, by_depth in sizes.items()}
    write(lambda: draw(*depth_charts(depths, megabytes, seconds), height=2.5), PICTURE)
    figures: dict[str, float] = {
        f"{method}_{depth}_bytes": size for method, by_depth in sizes.items() for depth, size in by_depth.items()
    }
    figures |= {f"{method}_growth": by_depth[200] / by_depth[10] for method, by_depth in sizes.items()}
    return figures | {"crossing_depth": _crossing(sizes["rgu"], sizes["fg2u"])}, PICTURE


def depth_charts(
    depths: Sequence[int], megabytes: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]]
) -> list[Chart]:
    """Both axes logarithmic: what grows with the depth is a slope, what does not is level."""
    return [
        Chart(
            title=title,
            series=[
                Series(name=name, x=depths, y=values, marker="o", color=color)
                for color, (name, values) in enumerate(lines.items())
            ],
            x=Axis(label="steps of the training", scale="log"),
            y=Axis(label=title, scale="log"),
        )
        for title, lines in (("peak, MB", megabytes), ("time, s", seconds))
    ]


def _crossing(reverse: Mapping[int, int], forward: Mapping[int, int]) -> float:
    """Reverse unrolling's bytes are a line in the depth."""
    low, high = min(reverse), max(reverse)
    return low + (forward[low] - reverse[low]) * (high - low) / (reverse[high] - reverse[low])
