"""Online adaptation: learn how much each token of a text should weigh in a gradient step, by differentiating the steps.

Setting: CaMeLS, Hu et al. 2023 (arXiv 2305.15076), one of the tasks of Shen et al. 2024 (arXiv 2406.14095).  A language
model reads a stream of passages, takes one SGD step on each, and is then tested on their content.  The loss of a step
over its n tokens is

    1/n  sum_i  w_phi(x_i) (-log p_theta(token i)).

phi -> meta, theta -> the model's parameters.  The weight model has one hidden layer over features x of a token:
w = softplus(o . tanh(W x + b) + c) / softplus(0).  It is positive, and starts at o = c = 0, where w = 1.

Differs from CaMeLS, where the weight model is a language model that reads the passage; here features are given.

[Note: one vector] The model's parameters are one vector theta [M], so an optimizer step takes a few operations
whatever the number of tensors.  With tangents, this halves the time of a small network.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedsign.bilevel.descent import GradientDescent
from fedsign.bilevel.unroll import Tree
from fedsign.bilevel.updates import Sgd

THETA = "theta"  # key of a state
Weigh = Callable[[Tree, Tensor], Tensor]


class Passage(NamedTuple):
    """Data of one step: tokens and their successors [n, T], and features of the successors [n, T, F]."""

    tokens: Tensor
    targets: Tensor
    features: Tensor


class Reader:
    """A network from tokens [n, T] to logits [n, T, V], as a function of all its parameters; see [Note: one vector].

    Buffers and the training mode stay as they are.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._shapes = {name: each.shape for name, each in network.named_parameters()}

    def parameters(self) -> Tensor:
        """The network's current parameters, [M]."""
        return torch.cat([each.detach().flatten() for each in self._network.parameters()])

    def logits(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """Logits [n, T, V]."""
        # split, not slices: the backward pass of each slice would add a zero-padded vector [M].
        parts = theta.split([prod(shape) for shape in self._shapes.values()])
        named = {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}
        # MATH is the only attention backend that supports second derivatives, in forward and in reverse mode.
        with sdpa_kernel(SDPBackend.MATH):
            logits: Tensor = functional_call(self._network, named, (tokens,))
        return logits

    def losses(self, theta: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """-log p of each target, in nats; [n, T]."""
        logits = self.logits(theta, tokens).flatten(0, 1)  # [n T, V]
        return functional.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)


def uniform(num_features: int, *, num_hidden: int, generator: torch.Generator) -> Tree:
    """A weight model that gives every token the weight 1; the random hidden layer breaks the symmetry."""
    drawn = torch.randn(num_features, num_hidden, generator=generator)
    return {
        "hidden.weight": drawn * num_features**-0.5,  # keeps tanh out of saturation
        "hidden.bias": torch.zeros(num_hidden),
        "out.weight": torch.zeros(num_hidden),
        "out.bias": torch.zeros(()),
    }


def token_weights(meta: Tree, features: Tensor) -> Tensor:
    """Features [..., F] -> weights [...].

    >>> token_weights(uniform(3, num_hidden=4, generator=torch.Generator()), torch.ones(2, 3))
    tensor([1., 1.])
    """
    # softplus(0) in the denominator makes the weight 1 where `out` is 0
    hidden = torch.tanh(features @ meta["hidden.weight"] + meta["hidden.bias"])
    raw = hidden @ meta["out.weight"] + meta["out.bias"]
    return functional.softplus(raw) / functional.softplus(torch.zeros_like(raw))


def adaptation(reader: Reader, *, start: Tensor, lr: float, weigh: Weigh = token_weights) -> GradientDescent:
    """The inner problem: from the parameters `start` [M], one SGD step per `Passage`."""

    def loss(own: Tree, meta: Tree, passage: Passage) -> Tensor:
        losses = reader.losses(own[THETA], passage.tokens, passage.targets)
        return (weigh(meta, passage.features) * losses).mean()

    return GradientDescent(start=lambda meta: {THETA: start}, loss=loss, update=Sgd(momentum=0.0), rate=lambda meta: lr)
