"""The cost of hypergradients: memory and time by depth, many directions at once, and a hand-written step as baseline.

The task: digits condensed to one image per class.

- By depth, with the MLP of 64 units and 10 directions: peak of the additional live bytes, by a torch dispatch mode;
    time of a hypergradient, all methods in turn.
- The ConvNet with InstanceNorm (3 blocks of width 16 and 128, digits padded to 16x16), 5 steps deep: 32 directions at
    once and one after another, in turn, with one thread and with one per core.
- The same compared with `benchmarks.alone.hand_jvp`, whose tangents are hand-written for this network, and with
    `torch.func`'s jvp, mapped over directions by vmap and one after another.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.alone import hand_jvp
from benchmarks.machine import machine
from benchmarks.measure import Result, dispersion, result_head, write_result
from fedsign.bilevel import directions
from fedsign.bilevel.condensation import IMAGES, Training, draws
from fedsign.bilevel.condense import Condensation
from fedsign.bilevel.settings import from_dict
from fedsign.bilevel.unroll import Inner, Problem, Tree, pushed
from fedsign.seeding import Purpose, torch_generator
from simulations.recipes.fg2u.fg2u_memory import METHODS, hypergradient, peak_bytes

NAME = "hypergradients"
DEPTHS = (10, 30, 100, 300, 1000)
WIDTHS, CONV_DEPTH, NUM_DIRECTIONS = (16, 128), 5, 32


def by_depth(repetitions: int) -> Result:
    """Measure bytes once, since they are deterministic, and seconds in turn."""
    found: Result = {}
    for depth in DEPTHS:
        takes = {method: hypergradient(method, depth) for method in METHODS}
        taken = _in_turn(takes, repetitions if depth <= 100 else 3)
        found[str(depth)] = {
            method: {"peak_bytes": peak_bytes(takes[method]), "seconds": dispersion(taken[method])}
            for method in METHODS
        }
        print(f"{NAME}: depth {depth} measured", flush=True)
    return found


def conv_problem(width: int) -> tuple[Training, Problem, Tree, Tree]:
    """Make the ConvNet on ten digits, with 32 directions of their pixels."""
    made = Condensation(
        from_dict({"network": {"kind": "conv", "width": width}, "image_size": 16, "inner": {"depth": CONV_DEPTH}})
    )
    meta, generator = made.begin().meta, torch_generator(0, Purpose.CONDENSATION, round=1)
    inner, _ = made.training(meta, generator)
    data = draws(len(meta[IMAGES]), depth=CONV_DEPTH, batch_size=10, rate=0.01, generator=generator)
    whole = [each._replace(chosen=torch.arange(10)) for each in data]  # the baseline supports only full batches
    images, targets = made.dataset.train.batch(torch.arange(256))

    def outer(state: Tree, _: Tree) -> Tensor:
        return torch.nn.functional.cross_entropy(made.network.outputs(state["parameters"], images), targets)

    vectors = directions.draw("rademacher", meta, count=NUM_DIRECTIONS, generator=generator)
    return inner, Problem(inner=inner, data=whole, outer=outer), meta, vectors


def by_hand(inner: Training, problem: Problem, meta: Tree, vectors: Tree) -> Tensor:
    """Return the tangents [b, M] of the final weights, in our order."""
    theta = [_to_hand(each, shape) for each, shape in zip(_parts(inner), _kinds(inner), strict=True)]
    targets, rates = inner.targets(meta), [each.rate for each in problem.data]
    _, z = hand_jvp.steps(theta, meta[IMAGES], vectors[IMAGES], targets, rates)
    return torch.cat([_to_ours(each).flatten(1) for each in z], 1)


def one_after_another(problem: Problem, meta: Tree, vectors: Tree) -> list[Tensor]:
    """Train once per direction."""
    return [
        pushed(problem, meta, {key: each[index : index + 1] for key, each in vectors.items()})[1]["parameters"]
        for index in range(NUM_DIRECTIONS)
    ]


def by_func(problem: Problem, meta: Tree, vectors: Tree) -> Tensor:
    """Map torch.func's jvp of `step` over the directions."""
    state = problem.inner.initial(meta)
    tangents = {key: each.new_zeros(len(vectors[IMAGES]), *each.shape) for key, each in state.items()}
    for data in problem.data:
        state, tangents = Inner.push(problem.inner, state, tangents, meta, vectors, data)
    return tangents["parameters"]


def by_func_one_after_another(problem: Problem, meta: Tree, vectors: Tree) -> list[Tensor]:
    """Train once per direction, without vmap."""
    ends = []
    for index in range(NUM_DIRECTIONS):
        direction = {key: each[index] for key, each in vectors.items()}
        state = problem.inner.initial(meta)
        tangent = {key: torch.zeros_like(each) for key, each in state.items()}
        for data in problem.data:
            step = partial(problem.inner.step, data=data)
            moved = torch.func.jvp(step, (state, meta), (tangent, direction))
            state, tangent = moved[0], moved[1]
        ends.append(tangent["parameters"][None])
    return ends


def conv_net(width: int, threads: int, repetitions: int) -> Result:
    """Check that all variants agree, and time them in turn."""
    inner, problem, meta, vectors = conv_problem(width)
    ways: dict[str, Callable[[], Any]] = {
        "together": lambda: pushed(problem, meta, vectors)[1]["parameters"],
        "one_after_another": lambda: torch.cat(one_after_another(problem, meta, vectors)),
        "by_hand": lambda: by_hand(inner, problem, meta, vectors),
        "by_func": lambda: by_func(problem, meta, vectors),
        "by_func_one_after_another": lambda: torch.cat(by_func_one_after_another(problem, meta, vectors)),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with torch.no_grad():
        ours = ways["together"]()
        error = {name: float((way() - ours).norm() / ours.norm()) for name, way in ways.items()}
        taken = _in_turn(ways, repetitions)
    torch.set_num_threads(before)
    pairs = {name: [one / own for one, own in zip(taken[name], taken["together"], strict=True)] for name in ways}
    print(f"{NAME}: width {width} measured with {threads} threads", flush=True)
    return {
        "width": width,
        "threads": threads,
        "error": error,
        "seconds": {name: dispersion(values) for name, values in taken.items()},
        "ratio_to_together": {name: dispersion(values) for name, values in pairs.items()},
        "ours_over_hand": dispersion([1 / value for value in pairs["by_hand"]]),
        "func_one_after_another_over_mapped": dispersion(
            [one / other for one, other in zip(taken["by_func_one_after_another"], taken["by_func"], strict=True)]
        ),
    }


def measure(path: Path, *, repetitions: int) -> None:
    """Measure everything."""
    before = machine()
    result = {
        **result_head(NAME, "Gradients through training", before, repetitions),
        "depths": by_depth(repetitions),
        "conv_nets": [
            conv_net(width, threads, repetitions) for width in WIDTHS for threads in sorted({1, os.cpu_count() or 1})
        ],
    }
    write_result(path, result)


def _in_turn(ways: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of each variant, after a warm-up repetition."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if repetition:
                taken[name].append(time.perf_counter() - began)
    return taken


def _parts(inner: Training) -> list[Tensor]:
    return [part for parts in inner.network.parts(inner.start) for part in parts]


def _kinds(inner: Training) -> list[bool]:
    """Whether each of `_parts` is a convolution's weight."""
    return [
        index == 0 and type(layer).__name__ == "Convolution"
        for layer in inner.network.layers
        for index, _ in enumerate(layer.shapes)
    ]


def _to_hand(part: Tensor, is_kernel: bool) -> Tensor:
    """Convert [9 i, o] -> [o, i, 3, 3]."""
    if not is_kernel:
        return part.clone()
    kernel: Tensor = part.unflatten(0, (3, 3, -1)).permute(3, 2, 0, 1)
    return kernel.contiguous()


def _to_ours(part: Tensor) -> Tensor:
    """Convert [b, o, i, 3, 3] -> [b, 9 i, o]; leave other shapes."""
    return part.permute(0, 3, 4, 2, 1).flatten(1, 3) if part.dim() == 5 else part
