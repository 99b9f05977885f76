"""Rounds of a federation as an inner problem: how the server's final loss depends on the hyperparameters.

One step is a whole round.  Each client of the cohort takes local steps from the global model: SGD with momentum and
weight decay on the task's loss plus the objective's penalty.  The server takes the weighted mean.  The global model is
the whole state between rounds.  Batches and cohorts are given, so a round equals the one that an engine would run.

[Note: knobs] Hyperparameters are constrained: rates are positive, client weights sum to 1.  A knob is therefore an
unconstrained tensor `raw` with the value softplus(raw), or softmax(raw) for weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedsign.bilevel.unroll import Inner, Tree
from fedsign.bilevel.updates import Sgd, parameters_of
from fedsign.errors import ConfigError

LR, WEIGHT_DECAY, WEIGHTS = "client.lr", "client.weight_decay", "aggregation.weights"
Batch = tuple[Tensor, Tensor]


class Client(NamedTuple):
    """A client's local steps in a round: features and targets per step."""

    number: int
    batches: Sequence[Batch]


class Round(NamedTuple):
    """The participants, and the schedule's factor on the learning rate."""

    clients: Sequence[Client]
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Federation(Inner):
    """The inner problem.

    `loss(parameters, features, targets)` is the loss of a batch; `penalty(parameters, received, settings)` is the
    objective's term, or None.  `settings` holds fixed values: `client.lr`, `client.weight_decay`, the strategy's own,
    and `aggregation.weights` [clients].
    """

    start: Tree
    loss: Callable[[Tree, Tensor, Tensor], Tensor]
    penalty: Callable[[Tree, Tree, Mapping[str, Tensor]], Tensor | None]
    settings: Mapping[str, Tensor]
    momentum: float = 0.0

    def initial(self, meta: Tree) -> Tree:
        """The initial global model; no knob affects it."""
        return dict(self.start)

    def step(self, state: Tree, meta: Tree, data: Round) -> Tree:
        """The global model after a round."""
        values = {**self.settings, **values_of(meta)}
        weights = values[WEIGHTS][[client.number for client in data.clients]]
        # of the cohort only: the softmax of the knob runs over all clients
        shares = weights / weights.sum()
        trained = [self._trained(state, values, client, data.factor) for client in data.clients]
        # [..., K] @ [K]
        return {name: torch.stack([own[name] for own in trained], -1) @ shares.to(state[name].dtype) for name in state}

    def _trained(self, received: Tree, values: Mapping[str, Tensor], client: Client, factor: float) -> Tree:
        """A client's model after its local steps."""
        update = Sgd(momentum=self.momentum)
        state = update.begin(received)

        def loss(own: Tree, features: Tensor, targets: Tensor) -> Tensor:
            found, penalty = self.loss(own, features, targets), self.penalty(own, received, values)
            return found if penalty is None else found + penalty

        for features, targets in client.batches:
            gradients = torch.func.grad(loss)(parameters_of(state), features, targets)
            # weight decay may be a knob, so it must be part of the graph
            decayed = {name: gradient + values[WEIGHT_DECAY] * state[name] for name, gradient in gradients.items()}
            state = update.apply(state, decayed, values[LR] * factor)
        return state


def values_of(meta: Tree) -> Tree:
    """The values of knobs; see [Note: knobs].

    >>> values_of({"client.lr": torch.tensor(0.0)})["client.lr"]  # ln 2
    tensor(0.6931)
    """
    return {name: torch.softmax(raw, 0) if name == WEIGHTS else functional.softplus(raw) for name, raw in meta.items()}


def raw_of(name: str, value: Tensor) -> Tensor:
    """The knob that has this value.

    Raises:
        ConfigError: the value is not positive.

    >>> values_of({"strategy.gamma": raw_of("strategy.gamma", torch.tensor(0.003))})["strategy.gamma"]
    tensor(0.0030)
    """
    if not bool((value > 0).all()):
        raise ConfigError(
            f"{name}={value.tolist()} was given as the start of what is to be learned; expected a number above 0."
        )
    if name == WEIGHTS:
        return value.log()
    # inverse softplus, log(e^v - 1), in a form that does not overflow
    return value + torch.log(-torch.expm1(-value))
