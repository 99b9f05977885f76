"""Data condensation: learn a few synthetic images on which a network trains as if on all of the data.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 4.1, and the authors' public code.  phi: the images (optionally
also the logits of soft labels).  Inner problem: SGD with momentum on batches drawn from them with replacement, a
half-cosine learning rate down to 0, penalty decay |theta|^2 (no factor 1/2).  Outer loss: cross-entropy on real
images, without the penalty.

The inner problem has hand-written tangents: the network is a chain of layers that know theirs, and SGD is linear.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedsign.bilevel.chain import Chain
from fedsign.bilevel.unroll import Inner, Tree
from fedsign.bilevel.updates import Sgd

IMAGES, LABELS = "images", "labels"
_PASSES = 6  # copies of a direction's activations in memory at the peak of a push


class Draw(NamedTuple):
    """Data of one step: indices of synthetic images, and the learning rate."""

    chosen: Tensor
    rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Training(Inner):
    """The inner problem.  `labels` [k] are the classes of the synthetic images, unused with soft labels."""

    network: Chain
    start: Tensor
    labels: Tensor
    num_classes: int
    momentum: float = 0.9
    decay: float = 1e-4

    def initial(self, meta: Tree) -> Tree:
        """The same weights for every phi, and zero velocity: its tangents are 0."""
        return self._update.begin({"parameters": self.start})

    def step(self, state: Tree, meta: Tree, data: Draw) -> Tree:
        """One SGD step, differentiable by autograd and `torch.func`."""
        images, targets = meta[IMAGES][data.chosen], self.targets(meta)[data.chosen]
        gradient = torch.func.grad(self._loss)(state["parameters"], images, targets)
        return self._update.apply(state, {"parameters": gradient}, data.rate)

    def push(self, state: Tree, tangents: Tree, meta: Tree, directions: Tree, data: Draw) -> tuple[Tree, Tree]:
        """One step with its tangents.  SGD is linear: tangents take the same step, in place."""
        # M = parameters, b = directions: theta [M], theta_t and momentum_t [b, M]
        theta, theta_t, momentum_t = state["parameters"], tangents["parameters"], tangents["parameters/0"]
        images, targets = meta[IMAGES][data.chosen], self.targets(meta)[data.chosen]
        gradient, passes = self.network.gradient(theta, images, targets)
        images_t, targets_t = (
            directions[IMAGES][:, data.chosen],
            self._targets_tangent(meta, directions)[:, data.chosen],
        )
        # d(decay |theta|^2) = 2 decay theta.  Tangents must be updated before theta_t moves: both read the old theta.
        momentum_t.mul_(self.momentum).add_(theta_t, alpha=2 * self.decay)
        self.network.add_tangents(passes, theta_t, images_t, targets_t, into=momentum_t)
        theta_t.add_(momentum_t, alpha=-data.rate)
        gradient.add_(theta, alpha=2 * self.decay)
        return self._update.apply(state, {"parameters": gradient}, data.rate), tangents

    def advance(self, state: Tree, meta: Tree, data: Draw) -> Tree:
        """One SGD step with the hand-written gradient."""
        theta = state["parameters"]
        gradient, _ = self.network.gradient(theta, meta[IMAGES][data.chosen], self.targets(meta)[data.chosen])
        gradient.add_(theta, alpha=2 * self.decay)
        return self._update.apply(state, {"parameters": gradient}, data.rate)

    def objective(self, state: Tree, meta: Tree) -> Tensor:
        """The penalized loss on all synthetic images."""
        return self._loss(state["parameters"], meta[IMAGES], self.targets(meta))

    def targets(self, meta: Tree) -> Tensor:
        """Class probabilities, [k, classes]."""
        if LABELS in meta:
            return torch.softmax(meta[LABELS], dim=-1)
        return functional.one_hot(self.labels, self.num_classes).to(self.start.dtype)

    def bytes_per_direction(self, meta: Tree, data: Sequence[Draw]) -> int:
        """Tangents of parameters, velocity and gradient, plus a batch's patches in every layer."""
        images = meta[IMAGES]
        activations = self.network.activations(tuple(images.shape[1:])) * len(data[0].chosen)
        return images.element_size() * (4 * self.network.size + images.numel() + _PASSES * activations)

    def _loss(self, theta: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        shares = torch.log_softmax(self.network.outputs(theta, images), dim=-1)
        return -(targets * shares).sum(-1).mean() + self.decay * theta.square().sum()

    @property
    def _update(self) -> Sgd:
        return Sgd(momentum=self.momentum)

    def _targets_tangent(self, meta: Tree, directions: Tree) -> Tensor:
        if LABELS not in meta:
            return self.start.new_zeros(len(directions[IMAGES]), len(self.labels), self.num_classes)
        shares, moved = torch.softmax(meta[LABELS], dim=-1), directions[LABELS]
        return shares * (moved - (shares * moved).sum(-1, keepdim=True))


def draws(num_images: int, *, depth: int, batch_size: int, rate: float, generator: torch.Generator) -> list[Draw]:
    """Batches drawn with replacement, and a half-cosine rate down to 0."""
    rates = [rate * 0.5 * (1 + math.cos(math.pi * step / depth)) for step in range(depth)]
    return [Draw(torch.randint(num_images, (batch_size,), generator=generator), each) for each in rates]
