"""Coordinate check: how large a model's activations are while it trains, and how far they have moved.

Paper: Dey et al. 2024 (arXiv 2405.15743), Figure 5, as the check of Yang et al. 2022 (arXiv 2203.03466): under the right rules the
mean |activation| does not depend on width and density, neither at the start nor after any number of steps.  What is looked at is
the output of the modules that the model's roles name as watched: attention and feed-forward of each block, or hidden layers.

One batch, which is the first one trained on, is looked at throughout, so that what has changed is the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.models.transform import prepare_training
from fedsign.optim.base import optimizer_of
from fedsign.parameterisation.roles import roles_of_model
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Mean |activation| of each watched module [steps + 1, modules], and of its change since the start."""

    modules: Sequence[str]
    size: NDArray[np.float64]
    change: NDArray[np.float64]


def coordinates(workload: Workload, *, steps: int) -> Coordinates:
    """Train the experiment's model on all its clients' samples, with their optimiser, and look at it before every step.

    Raises:
        ConfigError: the model names nothing to watch.
    """
    model, client = workload.make_model().train(), workload.config.client
    prepare_training(model)
    modules = roles_of_model(model).watched
    if not modules:
        raise ConfigError(
            f"model.name={workload.config.model.name} has no hidden layer to watch; give it two or more layers, or name modules in "
            "model_roles.watched."
        )
    optimizer = optimizer_of(client.optimizer, model, client.lr, client.weight_decay)
    batches = drawn_batches(workload)
    probe = next(batches)
    first = _activations(model, modules, probe[0])
    sizes, changes = [_means(first)], [np.zeros(len(modules))]
    batch = probe
    for _ in range(steps):
        optimizer.zero_grad()
        workload.training_task.loss(model(batch[0]), batch[1]).backward()
        if client.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), client.clip_norm)
        optimizer.step()
        now = _activations(model, modules, probe[0])
        sizes.append(_means(now))
        changes.append(_means([new - old for new, old in zip(now, first, strict=True)]))
        batch = next(batches)
    return Coordinates(modules=modules, size=np.stack(sizes), change=np.stack(changes))


def drawn_batches(workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end, each drawn from all samples."""
    samples, size = workload.training_samples, workload.config.client.batch_size
    rng = generator(workload.config.seed, Purpose.BATCHES)
    while True:
        yield samples.batch(torch.from_numpy(rng.choice(len(samples), size=min(size, len(samples)), replace=False)))


def _means(activations: Sequence[Tensor]) -> NDArray[np.float64]:
    return np.array([activation.abs().mean(dtype=torch.float64).item() for activation in activations])


def _activations(model: nn.Module, modules: Sequence[str], features: Tensor) -> list[Tensor]:
    seen: dict[str, Tensor] = {}

    def record(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[name] = output

    with torch.no_grad(), ExitStack() as hooks:
        for name in modules:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(record, name)))
        model(features)
    return [seen[name] for name in modules]
