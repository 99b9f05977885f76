"""Centralized fine-tuning of a language model as in the LISA paper, shared by the recipes on LISA.

The base is our `gpt` (6 blocks of width 96, characters, blocks of 128), trained with AdamW on every second document of
`pytext`. It is then fine-tuned on the other documents by one of the methods, and evaluated on held-out parts of these.
The seed determines everything random: initial weights, order of batches, layers.  Batches of 8, linear warm-up over a
tenth of the steps, then cosine decay, gradients clipped to norm 1, no weight decay.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsign.config import from_dict
from fedsign.data.base import AnySamples
from fedsign.optim.base import PartTrainer, optimizer_of
from fedsign.records import Tensors, tensors_of
from fedsign.schedules.warmup import warmup_cosine
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload
from simulations.recipes.cells import ONE_READER

Settings = Mapping[str, Any]

BATCH_SIZE = 8
PRETRAINING_STEPS = 600
METHODS: dict[str, Settings] = {
    "full": {"name": "adamw"},
    "lora": {"name": "lora", "rank": 8},
    "galore": {"name": "galore", "rank": 16},
    "lisa": {"name": "lisa", "num_sampled_layers": 2, "period": 10},
}


def fine_tune(
    method: Settings, *, lr: float, steps: int, seed: int = 0, pretraining_steps: int = PRETRAINING_STEPS
) -> float:
    """Fine-tune the base; return the final validation loss in nats per character."""
    work, model = pretrained(method, seed, pretraining_steps)
    # half 1: the base has seen half 0; round=2: other batches than the base's
    minimize(work, model, half(work.dataset.train, 1), steps=steps, lr=lr, round=2)
    return work.evaluate(model, (half(work.dataset.test, 1), None))["loss"]


def pretrained(method: Settings, seed: int, steps: int, *, tied: bool = True) -> tuple[Workload, nn.Module]:
    """Return the base in the form that the method needs."""
    with tempfile.TemporaryDirectory() as folder:
        start = write_base(Path(folder), seed, steps, tied=tied)
        work = workload(seed, method, tied=tied, start=str(start))
        return work, work.make_model()


def moment_bytes(method: Settings) -> int:
    """Measure the optimizer state that the method keeps of this model after a step."""
    work = workload(0, method)
    model = work.make_model()
    optimizer = minimize(work, model, work.dataset.train, steps=1, lr=1e-3, round=1)
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def write_base(folder: Path, seed: int, steps: int, *, tied: bool = True) -> Path:
    """Write the pretrained weights to a file."""
    path = folder / f"base-{seed}.safetensors"
    save_file(_base(seed, steps, tied=tied), path)
    return path


# the methods of a seed share its base, which takes longer to train than any of them
@lru_cache(maxsize=4)
def _base(seed: int, steps: int, *, tied: bool = True) -> Tensors:
    work = workload(seed, METHODS["full"], tied=tied)
    model = work.make_model()
    minimize(work, model, half(work.dataset.train, 0), steps=steps, lr=2e-3, round=1)
    return tensors_of(model)


def minimize(
    work: Workload,
    model: nn.Module,
    samples: AnySamples,
    *,
    steps: int,
    lr: float,
    round: int,
    on_step: Callable[[nn.Module], None] = lambda model: None,
) -> torch.optim.Optimizer:
    """Train on shuffled batches; the round is part of the seed of their order."""
    optimizer = begin(work, model, lr, round=round)
    rng = generator(work.config.seed, Purpose.BATCHES, round=round, partition=0)
    order: list[int] = []
    for step in range(1, steps + 1):
        if len(order) < BATCH_SIZE:
            order = rng.permutation(len(samples)).tolist()
        chosen, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        for group in optimizer.param_groups:
            group["lr"] = lr * warmup_cosine(step, steps)
        take_step(work, model, optimizer, samples.batch(torch.tensor(chosen)))
        on_step(model)
    return optimizer


def begin(work: Workload, model: nn.Module, lr: float, *, round: int) -> torch.optim.Optimizer:
    """Return the method's optimizer, with its first layers drawn if it trains a subset."""
    optimizer = optimizer_of(work.config.client.optimizer, model.train(), lr, 0.0)
    if isinstance(optimizer, PartTrainer):
        optimizer.begin(seed=work.config.seed, client=0, round=round, first_step=0)
    return optimizer


def take_step(work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """Take one step on a batch, with the gradient clipped to norm 1."""
    # None, not zeros: AdamW skips parameters without a gradient, such as LISA's frozen blocks
    optimizer.zero_grad(set_to_none=True)
    features, targets = batch
    work.task.loss(model(features), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def workload(seed: int, method: Settings, **model: Any) -> Workload:
    """Return data, task and model."""
    return Workload(from_dict(experiment(seed, method, **model)))


def experiment(seed: int, method: Settings, **model: Any) -> dict[str, Any]:
    """Return an experiment of one client with all data; `model` holds further model settings."""
    return {
        **ONE_READER,
        "seed": seed,
        "data": {"name": "pytext", "block_length": 128},
        "model": {"name": "gpt", "depth": 6, "width": 96, "num_heads": 3, **model},
        "client": {"batch_size": BATCH_SIZE, "clip_norm": 1.0, "optimizer": dict(method)},
    }


def share_of_gain(base: Sequence[float], own: Sequence[float], full: Sequence[float]) -> float:
    """Return the mean over seeds of the fraction of full fine-tuning's improvement that a method reaches."""
    # paired by seed, since each seed has a base of its own
    return fmean((start - reached) / (start - best) for start, reached, best in zip(base, own, full, strict=True))


def half(samples: AnySamples, half: int) -> AnySamples:
    """Return the samples of documents with even numbers, or of the others."""
    if samples.owners is None:
        raise ValueError("the text has no documents; expected a data set whose samples have owners.")
    return samples[np.flatnonzero(samples.owners.numpy() % 2 == half)]
