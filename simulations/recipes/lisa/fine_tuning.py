"""A language model fine-tuned in one place, as the paper on LISA does it: what its recipes share.

The base is our `gpt` (6 blocks of width 96, characters, blocks of 128), trained with AdamW on every second document of `pytext`; it
is then fine-tuned on the other documents by one of the methods, and judged on what was held out of these.  Everything that
is drawn belongs to the seed: initial weights, order of the batches, layers.  Batches of 8, linear warm-up over a tenth of the
steps and then a cosine, gradients clipped to norm 1, no weight decay.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsign.config import from_dict
from fedsign.data.base import AnySamples
from fedsign.optim.base import PartTrainer, subject
from fedsign.records import Tensors, tensors_of
from fedsign.registry import resolve
from fedsign.schedules.warmup import warmup_cosine
from fedsign.sections import OptimizerPart
from fedsign.seeding import Purpose, generator, torch_stream
from fedsign.tasks.base import IGNORED
from fedsign.workload import Workload

Settings = Mapping[str, Any]
OnStep = Callable[[int, nn.Module], None]

NUM_BLOCKS, WIDTH, BLOCK_LENGTH, BATCH_SIZE = 6, 96, 128, 8
PRETRAINING_STEPS, PRETRAINING_LR = 600, 2e-3
METHODS: dict[str, Settings] = {
    "full": {"name": "adamw"},
    "lora": {"name": "lora", "rank": 8},
    "galore": {"name": "galore", "rank": 16},
    "lisa": {"name": "lisa", "num_sampled_layers": 2, "period": 10},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One fine-tuning."""

    method: Settings  # of client.optimizer
    lr: float
    steps: int
    seed: int = 0
    pretraining_steps: int = PRETRAINING_STEPS
    tied: bool = True  # the head is the embedding


def fine_tune_all(jobs: Sequence[Job]) -> list[float]:
    """The last validation loss of each, in nats a character; a process for each core, in the order of the jobs."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        return list(pool.map(fine_tune, jobs))


def fine_tune(job: Job, on_step: OnStep = lambda step, model: None) -> float:
    """Train from the base; `on_step` sees the model before the first step, as step 0, and after each."""
    work, model = workload(job.seed, job.method), _start(job)
    train, test = _halves(work)[1]
    on_step(0, model)
    optimizer = made(job.method, model, job.lr)
    minimise(
        work, model, optimizer, train, steps=job.steps, lr=job.lr, round=2, note=lambda step, _: on_step(step, model)
    )
    return _loss_on(work, model, test)


def best_rates(losses: Mapping[tuple[str, float], float]) -> dict[str, float]:
    """The rate with the lowest loss of each method, of "(method, rate) -> loss"; one that diverged is never it."""
    best: dict[str, tuple[float, float]] = {}
    for (name, rate), loss in losses.items():
        found = (loss if isfinite(loss) else inf, rate)
        best[name] = min(found, best.get(name, found))
    return {name: rate for name, (_, rate) in best.items()}


def moment_bytes(method: Settings) -> int:
    """What the method's optimiser keeps of this model after a step, measured."""
    work = workload(0, method)
    model = work.make_model()
    optimizer = made(method, model, 1e-3)
    minimise(work, model, optimizer, work.dataset.train, steps=1, lr=1e-3, round=1)
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@lru_cache(maxsize=4)
def base(seed: int, steps: int, *, tied: bool = True) -> Tensors:
    """The pretrained weights."""
    work = workload(seed, METHODS["full"], tied=tied)
    model = work.make_model()
    train, _ = _halves(work)[0]
    minimise(work, model, made(METHODS["full"], model, PRETRAINING_LR), train, steps=steps, lr=PRETRAINING_LR, round=1)
    return tensors_of(model)


def minimise(
    work: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: AnySamples,
    *,
    steps: int,
    lr: float,
    round: int,
    note: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Steps on shuffled batches; the round is part of the seed of their order."""
    model.train()
    rng = generator(work.config.seed, Purpose.BATCHES, round=round, partition=0)
    if isinstance(optimizer, PartTrainer):
        optimizer.begin(seed=work.config.seed, client=0, round=round, first_step=0)
    order: list[int] = []
    for step in range(1, steps + 1):
        if len(order) < BATCH_SIZE:
            order = rng.permutation(len(samples)).tolist()
        chosen, order = order[:BATCH_SIZE], order[BATCH_SIZE:]
        for group in optimizer.param_groups:
            group["lr"] = lr * warmup_cosine(step, steps)
        optimizer.zero_grad(set_to_none=True)
        features, targets = samples.batch(torch.tensor(chosen))
        loss = work.task.loss(model(features), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        note(step, loss.item())


def made(method: Settings, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The method's optimiser of this model."""
    part = OptimizerPart(**method)
    optimizer: torch.optim.Optimizer = part.build(subject(part.name, model), lr, 0.0)
    return optimizer


def workload(seed: int, method: Settings, *, tied: bool = True) -> Workload:
    """Data, task and model."""
    return Workload(
        from_dict(
            {
                "seed": seed,
                "task": "language",
                "metrics": ["perplexity"],
                "data": {"name": "pytext", "block_length": BLOCK_LENGTH},
                "partition": {"name": "iid", "num_clients": 1},
                "server": {"cohort_size": 1},
                "model": {"name": "gpt", "depth": NUM_BLOCKS, "width": WIDTH, "num_heads": 3, "tied": tied},
                "client": {"optimizer": dict(method)},
            }
        )
    )


def _start(job: Job) -> nn.Module:
    """The base, with the method's adapters if it has any."""
    model = workload(job.seed, METHODS["full"], tied=job.tied).make_model()
    model.load_state_dict(base(job.seed, job.pretraining_steps, tied=job.tied))
    adapt = getattr(resolve("optimizer", str(job.method["name"])), "adapt_model", None)
    if adapt is not None:
        with torch_stream(job.seed, Purpose.ADAPTERS):
            adapt(model, workload(job.seed, job.method).config.client.optimizer.settings)
    return model


def _halves(work: Workload) -> list[tuple[AnySamples, AnySamples]]:
    """Training and test samples of the documents with an even number, and of the others."""
    train, test = work.dataset.train, work.dataset.test
    return [(_of_documents(train, half), _of_documents(test, half)) for half in (0, 1)]


def _of_documents(samples: AnySamples, half: int) -> AnySamples:
    if samples.owners is None:
        raise ValueError("the text has no documents; expected is a data set whose samples have owners.")
    return samples[np.flatnonzero(samples.owners.numpy() % 2 == half)]


@torch.no_grad()
def _loss_on(work: Workload, model: nn.Module, samples: AnySamples) -> float:
    """Mean over all characters."""
    model.eval()
    found: list[tuple[Tensor, int]] = [
        (work.task.loss(model(features), targets), int((targets != IGNORED).sum()))
        for features, targets in samples.batches(32)
    ]
    model.train()
    return float(sum(float(loss) * num for loss, num in found) / sum(num for _, num in found))


def _one_thread() -> None:
    torch.set_num_threads(1)
