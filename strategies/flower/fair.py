"""Flower's q-FedAvg: clients with a high loss weigh more.

Paper: Li et al. 2020 (arXiv 1905.10497), Algorithm 2, with L = 1 / client.lr:

    g_k = L (w - w_k),  Delta_k = F_k^q g_k,  h_k = q F_k^(q-1) |g_k|^2 + L F_k^q,  w <- w - sum_k Delta_k / sum_k h_k

Differs: the paper's F_k is the loss of the *received* model.  Our clients report the mean training loss of their last
local epoch, and that is what Flower gets.  q = 0 is the uniform mean.  Replies are not weighted.
"""

from typing import Annotated

from flwr.serverapp import strategy as flower
from pydantic import Field

from fedsign.flower.foreign_rules import Deferred
from fedsign.traits import declares
from strategies.flower.common import arguments


@declares(search_space={"q": "1e-3..5:log"}, special_case={"fedavg": {"q": 1e-5}})
def qfedavg(*, q: Annotated[float, Field(ge=0)] = 0.1) -> Deferred:
    """q-FedAvg with L = 1 / client.lr."""
    # deferred: L = 1 / client.lr is known only with the whole configuration
    return Deferred(
        make=lambda config: flower.QFedAvg(
            client_learning_rate=config.client.lr, q=q, train_loss_key="train-loss", **arguments()
        )
    )
