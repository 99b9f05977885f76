"""Client-level differential privacy at a server that is trusted, with a fixed clipping norm.

Paper: McMahan et al. 2018 (arXiv 1710.06963), with a fixed number n of clients a round instead of Poisson sampling.
C -> clip_norm, z -> noise_multiplier, u_k: client k's update (`fedsign.privacy.clipping`):

    mean update = (1/n) (sum_k u_k min(1, C / |u_k|) + N(0, (z C)^2) in every coordinate)

n is `server.cohort_size`, whoever replies: a reply that is missing counts as a zero update, so that what one client can change
does not depend on who failed.  Weights are uniform, since with weights by samples a client with many would count for more.

The strategy sees served + mean update, and nothing else of the clients: all that it makes of it is as private.

Who is sampled: with `sampling = secret` by numbers from the run's secret, and the budget counts on nobody knowing who
took part; with `public` from the experiment's seed, as without privacy, and the budget does not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsign.privacy.secret import Secret
from fedsign.privacy.settings import ClipNorm, Delta, NoiseMultiplier, Sampling
from fedsign.records import Tensors


@dataclass(kw_only=True, eq=False)
class Central:
    """The rule; `clip_norm` is that of the next round."""

    trusts_server: ClassVar = True

    clip_norm: ClipNorm
    noise_multiplier: NoiseMultiplier
    delta: Delta
    sampling: Sampling = "secret"
    secret_file: str = ""

    def check(self, *, cohort_size: int) -> None:
        """Raise ConfigError where the settings do not suit the cohort."""

    def update_multiplier(self, cohort_size: int) -> float:
        """The noise on the sum of updates, in clipping norms."""
        return self.noise_multiplier

    def follow(
        self, num_below: int, num_replies: int, *, cohort_size: int, secret: Secret, labels: Iterable[object]
    ) -> None:
        """What changes after a round in which so many of the replies' updates were at most as long as the norm."""

    def figures(self) -> dict[str, float]:
        """What the next round's line says of the rule."""
        return {}

    def state_dict(self) -> Tensors:
        """What changes from round to round, to be checkpointed."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take it back."""
