"""Digits condensed to a few images of each class: the set-up that its recipes share.

An MLP with one hidden layer of 64 units (`fedsign.bilevel.settings` has the rest), 300 steps of the images, judged by the test
accuracy of 20 fresh networks trained on them alone.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from fedsign.bilevel.condense import Condensation
from fedsign.bilevel.settings import from_dict

FG2U: Mapping[str, Any] = {"name": "fg2u", "num_directions": 32}
TRGU: Mapping[str, Any] = {"name": "trgu", "truncated_steps": 10}
HESSIAN_FREE: Mapping[str, Any] = {"name": "hessian_free"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One condensation."""

    method: Mapping[str, Any]
    seed: int
    steps: int = 300
    lr: float = 0.02  # of the images
    depth: int = 100
    start: str = "real"
    images_per_class: int = 1
    evaluations: int = 20
    first: Mapping[str, Any] | None = None  # the method of a first phase
    first_steps: int = 0


def condense_all(jobs: Sequence[Job]) -> list[float]:
    """The test accuracy of each, in their order; a process for each core."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        return list(pool.map(condense, jobs))


def condense(job: Job) -> float:
    """Test accuracy of networks trained on what it learnt."""
    tree: dict[str, Any] = {
        "seed": job.seed,
        "start": job.start,
        "images_per_class": job.images_per_class,
        "inner": {"depth": job.depth},
        "method": dict(job.method),
        "outer": {"steps": job.steps, "lr": job.lr, "evaluations": job.evaluations},
    }
    if job.first is not None:
        tree["first_phase"] = {"steps": job.first_steps, "method": dict(job.first)}
    condensation = Condensation(from_dict(tree))
    progress = condensation.begin()
    for _ in condensation.steps(progress):
        pass
    return condensation.evaluate(progress.meta)


def _one_thread() -> None:
    torch.set_num_threads(1)
