"""Online adaptation: which tokens of a text are worth how much of a gradient step, learnt through the steps.

Setting: CaMeLS, Hu et al. 2023 (arXiv 2305.15076), one of the tasks of Shen et al. 2024 (arXiv 2406.14095).  A language model reads a stream of
passages, takes one step of SGD on each, and is then judged on what the passages told.  The loss of a step is

    1/n  sum over the n tokens i of  w_phi(x_i) (-log p_theta(token i)),

phi -> meta, theta -> the model's parameters.  The weight model has one hidden layer over features x of a token: w = softplus(o . tanh(W x + b) + c) /
softplus(0), which is positive, and exactly 1 where o and c are 0; there it begins.

Differs from CaMeLS: the weight model there is a language model that reads the passage itself; here features come from outside.

[Note: one vector] The model's parameters are one vector theta [M]: what a step does beside the network is then a few operations, whatever
the number of tensors; with tangents that is half of the time of a small network.
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

THETA = "theta"  # of a state
Weigh = Callable[[Tree, Tensor], Tensor]


class Passage(NamedTuple):
    """What one step reads: tokens and the tokens that follow them [n, T], and features of the latter [n, T, F]."""

    tokens: Tensor
    targets: Tensor
    features: Tensor


class Reader:
    """A network from tokens [n, T] to logits [n, T, V] as a function of all its parameters; see [Note: one vector].

    Its buffers stay as they are, and so does whether it trains or not.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._shapes = {name: each.shape for name, each in network.named_parameters()}

    def parameters(self) -> Tensor:
        """The network's own, as they are now; [M]."""
        return torch.cat([each.detach().flatten() for each in self._network.parameters()])

    def logits(self, theta: Tensor, tokens: Tensor) -> Tensor:
        """[n, T, V], by the one attention of torch's whose gradient can be differentiated again, both ways."""
        parts = theta.split([prod(shape) for shape in self._shapes.values()])  # slices would be as many sums of [M]
        named = {name: part.view(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}
        with sdpa_kernel(SDPBackend.MATH):
            found: Tensor = functional_call(self._network, named, (tokens,))
        return found

    def losses(self, theta: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """-log p of each target, in nats; [n, T]."""
        logits = self.logits(theta, tokens).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)


def uniform(num_features: int, *, num_hidden: int, generator: torch.Generator) -> Tree:
    """A weight model that gives every token the weight 1, from where it can learn to tell them apart."""
    drawn = torch.randn(num_features, num_hidden, generator=generator)
    return {
        "hidden.weight": drawn * num_features**-0.5,
        "hidden.bias": torch.zeros(num_hidden),
        "out.weight": torch.zeros(num_hidden),
        "out.bias": torch.zeros(()),
    }


def token_weights(meta: Tree, features: Tensor) -> Tensor:
    """Features [..., F] -> weights [...].

    >>> token_weights(uniform(3, num_hidden=4, generator=torch.Generator()), torch.ones(2, 3))
    tensor([1., 1.])
    """
    hidden = torch.tanh(features @ meta["hidden.weight"] + meta["hidden.bias"])
    raw = hidden @ meta["out.weight"] + meta["out.bias"]
    return functional.softplus(raw) / functional.softplus(torch.zeros_like(raw))


def adaptation(reader: Reader, *, start: Tensor, lr: float, weigh: Weigh = token_weights) -> GradientDescent:
    """The inner problem: from the parameters `start` [M] a step of SGD on each `Passage`."""

    def loss(own: Tree, meta: Tree, passage: Passage) -> Tensor:
        losses = reader.losses(own[THETA], passage.tokens, passage.targets)
        return (weigh(meta, passage.features) * losses).mean()

    return GradientDescent(start=lambda meta: {THETA: start}, loss=loss, update=Sgd(momentum=0.0), rate=lambda meta: lr)
