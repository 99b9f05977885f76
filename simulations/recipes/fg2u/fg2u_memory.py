"""Memory and time of hypergradients by the depth of the training.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 3: reverse unrolling keeps the whole training, (FG)²U one state and b tangents.  Digits
condensed to one image of each class with an MLP of 64 units, b = 10; live bytes at the peak of one hypergradient, of what it makes
itself, by torch's dispatcher.  Seconds are of one hypergradient each and go into the picture alone.

Beyond the claim: the depth from which on (FG)²U is the smaller one.
"""

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedsign.bilevel.condense import Condensation
from fedsign.bilevel.settings import from_dict
from fedsign.memory.live import LiveBytes
from fedsign.report.figures import save, style
from fedsign.seeding import Purpose, torch_generator
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.fg2u.figures import draw_depths

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
    made = Condensation(
        from_dict(
            {
                "inner": {"depth": depth},
                "outer": {"batch_size": 256},
                "method": {"name": method, **METHODS[method]},
            }
        )
    )
    meta, found = made.begin().meta, made.config.method.build()

    problem = made.problem(meta, torch_generator(0, Purpose.CONDENSATION, round=1))

    def take() -> object:
        return found(problem, meta, generator=torch_generator(0, Purpose.CONDENSATION, round=2))

    take()
    return take


def peak_bytes(take: Callable[[], object]) -> int:
    """Live bytes at the peak of what a hypergradient makes itself."""
    with LiveBytes() as live:
        take()
    total: int = live.peak.total_bytes
    return total


@lru_cache
def _measured(quick: bool) -> dict[str, dict[int, tuple[int, float]]]:
    """Method -> depth -> bytes and seconds."""
    found: dict[str, dict[int, tuple[int, float]]] = {method: {} for method in METHODS}
    for method, by_depth in found.items():
        for depth in _QUICK_DEPTHS if quick else DEPTHS:
            take = hypergradient(method, depth)
            began = time.perf_counter()
            take()
            by_depth[depth] = peak_bytes(take), time.perf_counter() - began
    return found


def measure(quick: bool) -> Figures:
    """Bytes at each depth, their growth from 10 to 200, and where reverse unrolling and (FG)²U cross (quick: four depths)."""
    found = _measured(quick)
    figures: dict[str, float] = {}
    for method, by_depth in found.items():
        figures |= {f"{method}_{depth}_bytes": size for depth, (size, _) in by_depth.items()}
    for method in METHODS:
        figures[f"{method}_growth"] = found[method][200][0] / found[method][10][0]
    return {**figures, "crossing_depth": _crossing(found["rgu"], found["fg2u"])}


def _crossing(reverse: Mapping[int, tuple[int, float]], forward: Mapping[int, tuple[int, float]]) -> float:
    """Reverse unrolling's bytes are a line in the depth."""
    (low, (least, _)), *_, (high, (most, _)) = reverse.items()
    return low + (forward[low][0] - least) * (high - low) / (most - least)


def _picture(quick: bool) -> Path:
    found = _measured(quick)
    depths = list(found["rgu"])
    with style():
        drawn = draw_depths(
            depths,
            {method: [by_depth[depth][0] / 1e6 for depth in depths] for method, by_depth in found.items()},
            {method: [by_depth[depth][1] for depth in depths] for method, by_depth in found.items()},
        )
        save(drawn, PICTURE, "svg")
    return PICTURE


RECIPE = Recipe(
    name="fg2u-memory",
    claim="The memory of (FG)²U is the same at depth 10 and 200; that of reverse unrolling grows at least eightfold.",
    measure=measure,
    thresholds=(
        Threshold(figure="fg2u_growth", bound="within", value=1.0, tolerance=0.01),
        Threshold(figure="rgu_growth", bound="at least", value=8.0),
    ),
    page=_picture,
)
