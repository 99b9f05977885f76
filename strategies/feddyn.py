"""FedDyn: the server tracks the clients' mean drift and serves a model that corrects for it.

Paper: Acar et al. 2021 (arXiv 2111.04263), Algorithm 1, in the form of the authors' code:

    h_k += theta_k - theta_t           at each sampled client (fedsign.objectives.feddyn)
    mean of locals = mean_{k in S} theta_k                 evaluated
    theta_{t+1} = mean of locals + (1/K) sum_{k=1..K} h_k  served; K is the whole population

The server never sees the h_k.  Since h_k changes only when k is sampled, their mean moves by
(1/K) sum_{k in S} (theta_k - theta_t) = (|S|/K) (mean of locals - theta_t), given a uniform mean.
`mean_h` covers parameters only; buffers are averaged.

Partial updates: h_k of a parameter that k did not train stays, since its update is zero.  With S_p the clients that
sent parameter p, mean_h of p moves by (1/K) sum_{k in S_p} (theta_k - theta_t) = (|S_p|/K) (mean over S_p - theta_t).
A parameter that nobody sent is served unchanged: adding mean_h round after round, while no client pulls it back,
would make it diverge.
"""

from typing import ClassVar

import torch

from fedsign.objectives.feddyn import ALPHA, Alpha
from fedsign.records import ObjectiveSpec, Tensors
from strategies.base import Aggregate, Strategy


class FedDyn(Strategy):
    """Serves mean + mean_h and evaluates the mean; h_k tilts each client's loss.  `kept` holds mean_h."""

    search_space: ClassVar = {"alpha": "1e-3..1:log"}

    def __init__(self, *, alpha: Alpha = ALPHA) -> None:
        super().__init__(weighting="uniform")
        self.alpha = alpha

    def objective(self, round: int) -> ObjectiveSpec:
        """Task loss, the client's linear term, and the pull toward theta_t."""
        return ObjectiveSpec(name="feddyn", settings={"alpha": self.alpha})

    def server_update(self, aggregate: Aggregate) -> Tensors:
        """mean + mean_h, with this round's drift already in mean_h."""
        mean, trained = aggregate.mean, aggregate.parameters
        for name in trained:
            h = self.kept.get(name, torch.zeros_like(mean[name]))
            # |S_p| / K, not 1: the h_k of clients that were not sampled stay
            share = aggregate.num_sent[name] / aggregate.num_clients
            self.kept[name] = h + share * (mean[name] - aggregate.served[name])
        return {**mean, **{name: mean[name] + self.kept[name] for name in trained}}

    def evaluated(self, mean: Tensors) -> Tensors | None:
        """The mean of the clients' models."""
        return mean
