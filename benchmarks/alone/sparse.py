"""When compressed rows (CSR) pay off for sparse layers, forward and backward together, on one thread.

- A layer of W inputs and W outputs under a random mask, by batch size: outputs, gradients of inputs and of weights.
    Dense products (`nn.Linear`, gradients masked) and compressed ones (`fedsign.parameterization.products`) in turn;
    ratios of adjacent measurements.
- A whole training step of the recipes' language model with packed AdamW; embeddings, head and attention are dense.

Results include the choice of `engine.sparse_products=auto` for each layer.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.machine import machine
from benchmarks.measure import Result, dispersion, result_head, write_result
from fedsign.models.transform import prepare_training
from fedsign.optim.base import optimizer_of
from fedsign.parameterization.masks import mask_of
from fedsign.parameterization.products import SparseForward, pays
from fedsign.workload import Workload
from simulations.recipes.smupar.smupar_gpt import experiment
from simulations.sparsity.coordinates import drawn_batches

NAME = "sparse"
WIDTHS, ROWS = (256, 512, 1024, 2048), (64, 1024)
DENSITIES = tuple(1 / 2**power for power in range(2, 9))
STEPS = tuple((width, density) for width in (256, 512) for density in (1 / 4, 1 / 16, 1 / 64))
_LEAST_S = 0.02  # of calls timed together


def layer(width: int, density: float, rows: int) -> tuple[dict[str, Callable[[], None]], bool]:
    """Return both products' forward and backward passes, and which one the rule chooses."""
    mask = mask_of(0, "weight", (width, width), density)
    module = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        module.weight.mul_(mask.is_present)
    module.weight.register_hook(mask)
    compressed = SparseForward(module, mask, always=True)
    x, gradient = torch.randn(rows, width, requires_grad=True), torch.randn(rows, width)

    def forward_backward(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x.grad = module.weight.grad = None
        forward(x).backward(gradient)

    return {"dense": lambda: forward_backward(module), "csr": lambda: forward_backward(compressed)}, pays(mask, rows)


def step(width: int, density: float, products: str) -> Callable[[], None]:
    """Return a training step of 8 rows of 128 characters."""
    changes = {
        "client": {"optimizer": {"name": "packed_adamw"}},
        "parameterization": {"density": density},
        "engine": {"sparse_products": products},
    }
    workload = Workload(experiment(width=width, lr=2**-9, changes=changes))
    model, client = workload.make_model().train(), workload.config.client
    prepare_training(model)
    optimizer = optimizer_of(client.optimizer, model, client.lr, client.weight_decay)
    found = drawn_batches(workload)

    def take() -> None:
        features, targets = next(found)
        optimizer.zero_grad()
        workload.training_task.loss(model(features), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), client.clip_norm)
        optimizer.step()

    return take


def in_turn(competitors: dict[str, Callable[[], None]], repetitions: int) -> Result:
    """Return seconds per call, and ratios of adjacent wall-clock and process times; the first repetition is a warm-
    up.
    """
    calls = {name: _calls(call) for name, call in competitors.items()}
    taken = [{name: _timed(call, calls[name]) for name, call in competitors.items()} for _ in range(repetitions + 1)][
        1:
    ]
    return {
        **{f"{name}_s": dispersion([each[name][0] for each in taken]) for name in competitors},
        "ratio": dispersion([each["csr"][0] / each["dense"][0] for each in taken]),
        "cpu_ratio": dispersion([each["csr"][1] / each["dense"][1] for each in taken]),
    }


def _calls(call: Callable[[], None]) -> int:
    call()
    return max(1, round(_LEAST_S / _timed(call, 1)[0]))


def _timed(call: Callable[[], None], calls: int) -> tuple[float, float]:
    began, own = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls, (time.process_time() - own) / calls


def _layers(repetitions: int) -> Iterator[Result]:
    for rows in ROWS:
        for width in WIDTHS:
            for density in DENSITIES:
                competitors, by_rule = layer(width, density, rows)
                found = in_turn(competitors, repetitions)
                yield {"rows": rows, "width": width, "density": density, "csr_by_rule": by_rule, **found}


def _steps(repetitions: int) -> Iterator[Result]:
    for width, density in STEPS:
        competitors = {products: step(width, density, products) for products in ("dense", "csr")}
        yield {"width": width, "density": density, **in_turn(competitors, repetitions)}


def measure(path: Path, *, repetitions: int) -> None:
    """Measure layers, then steps."""
    before = machine()
    result: dict[str, Any] = {
        **result_head(NAME, "Products of sparse layers", before, repetitions),
        "threads": torch.get_num_threads(),
        "layers": [],
        "steps": [],
    }
    for kind, rows in (("layers", _layers(repetitions)), ("steps", _steps(repetitions))):
        for row in rows:
            result[kind].append(row)
            where = f"{row['rows']} rows, " if "rows" in row else "a step, "
            print(
                f"{NAME}: {where}width {row['width']}, density 1/{1 / row['density']:g}: compressed rows take "
                f"{row['ratio']['median']:.2f} of the time, {row['cpu_ratio']['median']:.2f} of the processor's",
                flush=True,
            )
    write_result(path, result)
