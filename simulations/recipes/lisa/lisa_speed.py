"""The time of one iteration: LISA, full fine-tuning and LoRA in turn, on the same model and batches.

Paper: Pan et al. 2024 (arXiv 2403.17919), section 4.1: for LLaMA-2-7B with batches of one, on a GPU, an iteration of LISA takes 1/2.9 of
full fine-tuning's time and 1/1.5 of LoRA's.  Here: our `gpt` of 12 blocks, width 256 and 8 heads, batches of 8 rows of 128
characters, torch's AdamW as it comes (on a CPU a loop over the tensors), on this machine's CPU and as many threads as torch takes.  By counting multiplications, forward
and backward to the inputs cost LISA the same as all, and the gradients of weights a sixth, so that (1 + 1 + 1/6)/3 of full
fine-tuning's are left, 1.38 times as fast; the optimiser's share comes on top.

The methods take single steps in turn, in an order that changes, so that whatever else the machine does falls on all; ratios are
medians of the rounds' ratios.  The hypothesis was fixed before anything was run: 1.2 times as fast as full fine-tuning or more, not
slower than LoRA.  On a machine that is busy this can fail for reasons that are not LISA's: run it again alone.
"""

import time
from collections.abc import Callable
from itertools import cycle, islice
from statistics import median

import torch
from torch import nn

from fedsign.optim.base import PartTrainer, optimizer_of
from simulations.recipes.base import Figures, at_least, recipe
from simulations.recipes.lisa.fine_tuning import BATCH_SIZE, METHODS, workload

_WARM_UP = 2  # steps of each, which are not counted


@recipe(
    "An iteration of LISA with 2 of 12 blocks is at least 1.2 times as fast as one of full fine-tuning, and not slower than LoRA's.",
    at_least(1.2, "full_over_lisa"),
    at_least(1.0, "lora_over_lisa"),
    quick=[at_least(0.5, "full_over_lisa")],
)
def lisa_speed(quick: bool) -> Figures:
    """Seconds of an iteration (median), and how many times as fast LISA is (quick: 4 blocks, 3 rounds)."""
    rounds, steps = (3 if quick else 25), {name: _stepper(name, quick) for name in ("full", "lora", "lisa")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(rounds + _WARM_UP):
        for name in islice(cycle(steps), at % len(steps), at % len(steps) + len(steps)):
            began = time.perf_counter()
            steps[name]()
            if at >= _WARM_UP:
                times[name].append(time.perf_counter() - began)
    ratios = {
        f"{name}_over_lisa": median(its / mine for its, mine in zip(times[name], times["lisa"], strict=True))
        for name in ("full", "lora")
    }
    return {**{f"{name}_s": median(found) for name, found in times.items()}, **ratios}


def _stepper(name: str, quick: bool) -> Callable[[], None]:
    method = {**METHODS[name], "period": 5} if name == "lisa" else METHODS[name]
    work = workload(0, method, depth=4 if quick else 12, width=256, num_heads=8)
    model = work.make_model().train()
    optimizer = optimizer_of(work.config.client.optimizer, model, 1e-4, 0.0)
    if isinstance(optimizer, PartTrainer):
        optimizer.begin(seed=0, client=0, round=1, first_step=0)
    features, targets = work.dataset.train.batch(torch.arange(BATCH_SIZE))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        work.task.loss(model(features), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
