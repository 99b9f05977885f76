"""SCAFFOLD: control variates at the server and at every client correct for client drift.

Paper: Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1, option II.  The client side is in
`fedsign.objectives.scaffold`.  With a sample S of N clients:

    x <- mean of the clients' models        (for a server learning rate: server.optimizer.name = sgd)
    c <- c + (|S|/N) mean_{k in S} (c_k+ - c_k)

c starts at 0 and stays the mean of all c_k.  Both means have the replies' weights, which the paper does not have: with
weighted models and a uniform c, the weighted mean of the corrections c - c_k would not be 0, and clients would move to
the optimum of the unweighted clients.  With unequal weights, c is the weighted mean of all c_k only if all clients take
part.  Requests and replies are twice the size of the model.

A stale control variate acts on every local step.  With few clients per round, momentum, and a high learning rate,
training can diverge after dozens of rounds; `client.clip_norm` helps.

Partial training is refused: option II derives a client's mean gradient from how far its parameters moved, so a
frozen parameter would have none.
"""

from typing import ClassVar

import torch

from fedsign.records import ObjectiveSpec, Tensors
from strategies.base import Aggregate, Strategy, Weighting


class SCAFFOLD(Strategy):
    """Serves the mean and the control variate c; c - c_k corrects each local step.  `kept` holds c."""

    takes_parts: ClassVar[bool] = False

    def __init__(self, *, weighting: Weighting = "uniform") -> None:
        super().__init__(weighting=weighting)

    def objective(self, round: int) -> ObjectiveSpec:
        """Task loss with the correction as a linear term."""
        return ObjectiveSpec(name="scaffold")

    def shared(self) -> Tensors:
        """c; empty in the first round, when it is zero."""
        return dict(self.kept)

    def server_update(self, aggregate: Aggregate) -> Tensors:
        """The mean; c takes in the clients' changes."""
        # `extra` is the replies' mean; c is the mean over the population, where the others have not changed
        share = aggregate.num_replies / aggregate.num_clients
        for name in aggregate.parameters:
            control = self.kept.get(name, torch.zeros_like(aggregate.mean[name]))
            self.kept[name] = control + share * aggregate.extra[name]
        return aggregate.mean
