"""SCAFFOLD: control variates at the server and at every client correct for the clients' drift.

Paper: Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1, option II; the clients' side stands in
`fedsign.objectives.scaffold`.  With S sampled of N clients:

    x <- mean of the clients' models        (a server learning rate: server.optimizer.name = sgd)
    c <- c + (1/N) sum_{k in S} (c_k+ - c_k)

so that c stays the mean of all c_k, as it starts (0).  Requests and replies are twice a model.

A control variate that is out of date pushes in every local step: with few clients a round, momentum and a high
learning rate, training can break down after dozens of rounds; `client.clip_norm` holds against that.

Clients that train a part of the model at a time are refused: option II reads a client's mean gradient off the distance that it
went, and where it did not go there is none to read.
"""

from typing import ClassVar

import torch

from fedsign.records import ObjectiveSpec, Tensors
from strategies.base import Aggregate, Strategy, Weighting


class SCAFFOLD(Strategy):
    """Serves the mean and the control variate c; the clients' steps are corrected by c - c_k.  `kept` is c."""

    takes_parts: ClassVar[bool] = False

    def __init__(self, *, weighting: Weighting = "uniform") -> None:
        super().__init__(weighting=weighting)

    def objective(self, round: int) -> ObjectiveSpec:
        """Task loss with the correction as a linear term."""
        return ObjectiveSpec(name="scaffold")

    def shared(self) -> Tensors:
        """c; nothing before the first round, when it is zero."""
        return dict(self.kept)

    def move(self, round: Aggregate) -> Tensors:
        """The mean, after c has taken in the clients' changes."""
        share = round.num_replies / round.num_clients
        for name in round.parameters:
            control = self.kept.get(name, torch.zeros_like(round.mean[name]))
            self.kept[name] = control + share * round.extra[name]
        return round.mean
