"""Flower's central differential privacy around its FedAvg, with the clipping at the server or at the clients.

Paper, fixed clipping: McMahan et al. 2018 (arXiv 1710.06963).  C -> clipping_norm, z -> noise_multiplier, n -> the cohort:

    w <- w + mean_k u_k min(1, C / |u_k|) + N(0, (z C / n)^2)  in every coordinate

Adaptive clipping: Andrew et al. 2021 (arXiv 1905.03871): C follows a quantile of the updates' norms.  Part of the noise
goes to the count of clipped updates (`clipped_count_stddev`), so that the model's is a little larger:
z_model = (z^-2 - (2 clipped_count_stddev)^-2)^(-1/2).

Flower differs, in the adaptive ones.  The paper's C <- C exp(-lr (b - target)) has b = the share of updates *below* C;
Flower puts in the share that was clipped, those *above* C.  So C moves away from the quantile: while most updates are
clipped it shrinks, while few are it grows.  And at the server the noise is scaled by the C of after the update,
while updates were clipped by the one before.  The rows are here for comparison with Flower; prefer fixed clipping.

The mean is uniform here: the noise is computed for it, and with weights by samples one client could count for more.
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


# Updates are clipped at the server, or by the clients, where the noise is still the server's; those with an adaptive norm tell
# the server whether they clipped, and its noise takes a twentieth of the cohort by default.
server_fixed = _fixed(flower.DifferentialPrivacyServerSideFixedClipping)
client_fixed = _fixed(flower.DifferentialPrivacyClientSideFixedClipping)
server_adaptive = _adaptive(flower.DifferentialPrivacyServerSideAdaptiveClipping)
client_adaptive = _adaptive(flower.DifferentialPrivacyClientSideAdaptiveClipping)
