"""Flower's server optimizers: the negative mean update serves as a gradient.

Paper: Reddi et al. 2021 (arXiv 2003.00295), Algorithm 2.  Delta_t is the weighted mean of the replies minus the
served model:

    m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t
    FedAdagrad  v_t = v_{t-1} + Delta_t^2                                          (beta_1 = 0)
    FedAdam     v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2
    FedYogi     v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)
    x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)

FedAvgM: Hsu et al. 2019 (arXiv 1909.06335): v <- momentum v - Delta_t, x <- x - lr v.

Flower differs from the paper: v_0 = 0, where the paper starts at tau^2 or more; Delta_t is weighted by samples by
default; FedAdam applies Adam's bias correction with exponent t + 1 instead of t, which makes its first step 0.74 eta
instead of eta with the default betas.
"""

from typing import Annotated

from flwr.serverapp import strategy as flower
from pydantic import Field

from fedsign.traits import declares
from strategies.base import Weighting
from strategies.flower.common import arguments

Step = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


@declares(search_space={"eta": "x0.1..x10:log"})
def fedadam(
    *, eta: Step = 0.1, beta_1: Beta = 0.9, beta_2: Beta = 0.99, tau: Step = 1e-3, weighting: Weighting = "examples"
) -> flower.FedAdam:
    """Server-side Adam."""
    return flower.FedAdam(eta=eta, beta_1=beta_1, beta_2=beta_2, tau=tau, **arguments(weighting))


@declares(search_space={"eta": "x0.1..x10:log"})
def fedyogi(
    *, eta: Step = 0.01, beta_1: Beta = 0.9, beta_2: Beta = 0.99, tau: Step = 1e-3, weighting: Weighting = "examples"
) -> flower.FedYogi:
    """Server-side Yogi: v changes by at most (1 - beta_2) Delta^2 per round."""
    return flower.FedYogi(eta=eta, beta_1=beta_1, beta_2=beta_2, tau=tau, **arguments(weighting))


@declares(search_space={"eta": "x0.1..x10:log"})
def fedadagrad(*, eta: Step = 0.1, tau: Step = 1e-3, weighting: Weighting = "examples") -> flower.FedAdagrad:
    """Server-side Adagrad."""
    return flower.FedAdagrad(eta=eta, tau=tau, **arguments(weighting))


@declares(
    search_space={"server_learning_rate": "x0.1..x3:log"},
    special_case={"flower_fedavg": {"server_learning_rate": 1.0, "server_momentum": 0.0}},
)
def fedavgm(
    *, server_learning_rate: Step = 1.0, server_momentum: Beta = 0.9, weighting: Weighting = "examples"
) -> flower.FedAvgM:
    """Server-side momentum; Flower's default momentum of 0 would be FedAvg."""
    return flower.FedAvgM(
        server_learning_rate=server_learning_rate, server_momentum=server_momentum, **arguments(weighting)
    )
