"""Flower's central differential privacy around FedAvg, with clipping at the server or at the clients.

Fixed clipping: McMahan et al. 2018 (arXiv 1710.06963), with C = clipping_norm, z = noise_multiplier, and a cohort of n:

    w <- w + mean_k u_k min(1, C / |u_k|) + N(0, (z C / n)^2)  in every coordinate

Adaptive clipping: Andrew et al. 2021 (arXiv 1905.03871).  C tracks a quantile of the update norms.  The count of
clipped updates gets noise too (`clipped_count_stddev`), so the model's noise must be slightly larger:
z_model = (z^-2 - (2 clipped_count_stddev)^-2)^(-1/2).

Flower's adaptive clipping differs from the paper.  In C <- C exp(-lr (b - target)) the paper's b is the share of
updates *below* C, Flower's is the share that was clipped, those *above* C.  So C moves away from the quantile: it
shrinks while most updates are clipped and grows while few are.  The server-side version also scales the noise by the
new C although it clipped with the old one.  These strategies exist for comparison with Flower; prefer fixed clipping.

The mean is always uniform, as the noise calibration assumes: weighted by samples, one client could count for more.
"""

from collections.abc import Callable
from typing import Annotated

from flwr.serverapp import strategy as flower
from pydantic import Field

from fedsign.config import ExperimentConfig
from fedsign.flower.foreign_rules import Deferred
from strategies.flower.common import arguments

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _fixed(wrapper: Callable[..., flower.Strategy]) -> Callable[..., Deferred]:
    def strategy(*, noise_multiplier: NonNegative, clipping_norm: Positive) -> Deferred:
        def make(config: ExperimentConfig) -> flower.Strategy:
            inner = flower.FedAvg(**arguments("uniform"))
            return wrapper(inner, noise_multiplier, clipping_norm, config.server.cohort_size)

        return Deferred(make=make)

    return strategy


def _adaptive(wrapper: Callable[..., flower.Strategy]) -> Callable[..., Deferred]:
    def strategy(
        *,
        noise_multiplier: NonNegative,
        initial_clipping_norm: Positive = 0.1,
        target_clipped_quantile: Share = 0.5,
        clip_norm_lr: Positive = 0.2,
        clipped_count_stddev: NonNegative | None = None,
    ) -> Deferred:
        clipping = (initial_clipping_norm, target_clipped_quantile, clip_norm_lr, clipped_count_stddev)

        def make(config: ExperimentConfig) -> flower.Strategy:
            inner = flower.FedAvg(**arguments("uniform"))
            return wrapper(inner, noise_multiplier, config.server.cohort_size, *clipping)

        return Deferred(make=make)

    return strategy


# The server adds the noise in all four.  With client-side adaptive clipping each client reports whether it clipped; the
# default noise on that count is a twentieth of the cohort.
server_fixed = _fixed(flower.DifferentialPrivacyServerSideFixedClipping)
client_fixed = _fixed(flower.DifferentialPrivacyClientSideFixedClipping)
server_adaptive = _adaptive(flower.DifferentialPrivacyServerSideAdaptiveClipping)
client_adaptive = _adaptive(flower.DifferentialPrivacyClientSideAdaptiveClipping)
