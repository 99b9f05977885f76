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

from typing import Annotated

from flwr.serverapp import strategy as flower
from pydantic import Field

from fedsign.config import ExperimentConfig
from fedsign.flower.foreign_rules import Deferred
from strategies.flower.common import arguments

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def server_fixed(*, noise_multiplier: NonNegative, clipping_norm: Positive) -> Deferred:
    """Updates are clipped at the server."""
    return _fixed(flower.DifferentialPrivacyServerSideFixedClipping, noise_multiplier, clipping_norm)


def client_fixed(*, noise_multiplier: NonNegative, clipping_norm: Positive) -> Deferred:
    """Updates are clipped by the clients; the noise is still the server's."""
    return _fixed(flower.DifferentialPrivacyClientSideFixedClipping, noise_multiplier, clipping_norm)


def server_adaptive(
    *,
    noise_multiplier: NonNegative,
    initial_clipping_norm: Positive = 0.1,
    target_clipped_quantile: Share = 0.5,
    clip_norm_lr: Positive = 0.2,
    clipped_count_stddev: NonNegative | None = None,
) -> Deferred:
    """Updates are clipped at the server by a norm that changes; its noise takes a twentieth of the cohort by default."""
    return _adaptive(
        flower.DifferentialPrivacyServerSideAdaptiveClipping,
        noise_multiplier,
        (initial_clipping_norm, target_clipped_quantile, clip_norm_lr, clipped_count_stddev),
    )


def client_adaptive(
    *,
    noise_multiplier: NonNegative,
    initial_clipping_norm: Positive = 0.1,
    target_clipped_quantile: Share = 0.5,
    clip_norm_lr: Positive = 0.2,
    clipped_count_stddev: NonNegative | None = None,
) -> Deferred:
    """Updates are clipped by the clients, which tell the server whether they clipped."""
    return _adaptive(
        flower.DifferentialPrivacyClientSideAdaptiveClipping,
        noise_multiplier,
        (initial_clipping_norm, target_clipped_quantile, clip_norm_lr, clipped_count_stddev),
    )


def _fixed(
    wrapper: type[flower.DifferentialPrivacyServerSideFixedClipping]
    | type[flower.DifferentialPrivacyClientSideFixedClipping],
    noise_multiplier: float,
    clipping_norm: float,
) -> Deferred:
    def make(
        config: ExperimentConfig,
    ) -> flower.DifferentialPrivacyServerSideFixedClipping | flower.DifferentialPrivacyClientSideFixedClipping:
        inner = flower.FedAvg(**arguments("uniform"))
        return wrapper(inner, noise_multiplier, clipping_norm, config.server.cohort_size)

    return Deferred(make=make)


def _adaptive(
    wrapper: type[flower.DifferentialPrivacyServerSideAdaptiveClipping]
    | type[flower.DifferentialPrivacyClientSideAdaptiveClipping],
    noise_multiplier: float,
    clipping: tuple[float, float, float, float | None],
) -> Deferred:
    """`clipping` as the wrappers take it after the cohort's size."""

    def make(
        config: ExperimentConfig,
    ) -> flower.DifferentialPrivacyServerSideAdaptiveClipping | flower.DifferentialPrivacyClientSideAdaptiveClipping:
        inner = flower.FedAvg(**arguments("uniform"))
        return wrapper(inner, noise_multiplier, config.server.cohort_size, *clipping)

    return Deferred(make=make)
