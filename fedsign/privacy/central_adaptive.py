"""Client-level central differential privacy with a clipping norm that tracks a quantile of the update norms.

Paper: Andrew et al. 2021 (arXiv 1905.03871).  g -> target_quantile, eta -> clip_lr, s -> count_noise_stddev, with n
clients per round, and b_k = 1 if |u_k| <= C, else 0:

    b = 1/2 + (1/n) (sum_k (b_k - 1/2) + N(0, s^2))      the noisy share of updates that are not clipped
    C <- C exp(-eta (b - g))                             after the round
    y = (z^-2 - (2 s)^-2)^(-1/2)                         the noise on the updates, in clipping norms; both together cost
                                                         as much as z alone (`fedsign.privacy.accounting`)

The noise on a round's updates is scaled by the C that clipped them.  A missing reply counts as neither: b_k - 1/2 = 0.
By default s is a twentieth of the cohort, as in the paper, but at least z, which keeps the norm stable in small
cohorts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedsign.errors import ConfigError
from fedsign.privacy.central import Central
from fedsign.privacy.secret import Secret
from fedsign.privacy.settings import ClipNorm, Share
from fedsign.records import Tensors

_CLIP_NORM = "clip_norm"


@dataclass(kw_only=True, eq=False)
class CentralAdaptive(Central):
    """Adaptive central differential privacy; `clip_norm` applies to the next round."""

    clip_norm: float = field(init=False)
    initial_clip_norm: ClipNorm = 0.1
    target_quantile: Share = 0.5
    clip_lr: Annotated[float, Field(gt=0)] = 0.2
    count_noise_stddev: Annotated[float, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        self.clip_norm = self.initial_clip_norm

    def check(self, *, cohort_size: int) -> None:
        """Raise ConfigError unless the count leaves some budget for the updates."""
        stddev = self._stddev(cohort_size)
        if self.noise_multiplier and self.noise_multiplier >= 2 * stddev:
            raise ConfigError(
                f"privacy.count_noise_stddev={stddev:g} was given with "
                f"privacy.noise_multiplier={self.noise_multiplier:g}; expected "
                "more than half of that, or the count alone would cost more than both may: raise it, or leave it out."
            )

    def update_multiplier(self, cohort_size: int) -> float:
        """y, or 0 without noise."""
        if not self.noise_multiplier:
            return 0.0
        return float((self.noise_multiplier**-2 - (2 * self._stddev(cohort_size)) ** -2) ** -0.5)

    def follow(
        self, num_below: int, num_replies: int, *, cohort_size: int, secret: Secret, labels: Iterable[object]
    ) -> None:
        """C <- C exp(-eta (b - g))."""
        stddev = self._stddev(cohort_size)
        noise = stddev * secret.normal(1, "count", *labels)[0] if stddev else 0.0
        # sum_k (b_k - 1/2) over the replies; missing ones contribute 0
        below = 0.5 + (num_below - num_replies / 2 + noise) / cohort_size
        self.clip_norm *= math.exp(-self.clip_lr * (below - self.target_quantile))

    def metrics(self) -> dict[str, float]:
        """The clipping norm, which may be published like the model, since it depends on noisy counts only."""
        return {_CLIP_NORM: self.clip_norm}

    def state_dict(self) -> Tensors:
        """The clipping norm."""
        return {_CLIP_NORM: torch.tensor(self.clip_norm, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the clipping norm."""
        self.clip_norm = float(state[_CLIP_NORM])

    def _stddev(self, cohort_size: int) -> float:
        if self.count_noise_stddev is not None:
            return self.count_noise_stddev
        return max(cohort_size / 20, self.noise_multiplier) if self.noise_multiplier else 0.0
