"""Client-level central differential privacy: a trusted server clips by a fixed norm and adds noise.

Paper: McMahan et al. 2018 (arXiv 1710.06963), with a fixed number n of clients per round instead of Poisson sampling.
C -> clip_norm, z -> noise_multiplier, u_k is client k's update (`fedsign.privacy.clipping`):

    mean update = (1/n) (sum_k u_k min(1, C / |u_k|) + N(0, (z C)^2) in every coordinate)

n is always `server.cohort_size`: a missing reply counts as a zero update, so the sensitivity does not depend on
failures.  Weights are uniform, since weighted by samples a client with many could count for more.

This is an `Aggregator`: the strategy sees only served + mean update, so everything that it computes is as private.

`sampling = secret` draws cohorts from the run's secret, and the accounting relies on nobody knowing who took part.
`public` draws them from the experiment's seed, as without privacy, and the accounting does not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedsign.errors import FedSignError
from fedsign.federation.aggregation import Aggregate, Aggregator, Weigh
from fedsign.privacy.clipping import Layout, clipped
from fedsign.privacy.secret import Secret, digest_of, open_secret
from fedsign.privacy.settings import ClipNorm, Delta, NoiseMultiplier, Sampling
from fedsign.records import Reply, Tensors, one_by_one

MODEL = "model"  # the holder of central releases; with local privacy each client is one


@dataclass(kw_only=True, eq=False)
class Central(Aggregator):
    """Central differential privacy; `clip_norm` applies to the next round."""

    prefix = "privacy/"
    takes_substitutes: ClassVar = False  # they would change the sampling probability that the accounting assumes
    trusts_server: ClassVar = True
    # metrics of unclipped updates, omitted from records
    withheld: ClassVar = ("train_loss", "update_norm", "client_drift")

    clip_norm: ClipNorm
    noise_multiplier: NoiseMultiplier
    delta: Delta
    sampling: Sampling = "secret"
    secret_file: str = ""
    cohort_size: int = field(init=False, default=0)
    _secret: Secret | None = field(init=False, default=None, repr=False)
    _released: dict[str, str] = field(init=False, default_factory=dict)

    def check(self, *, cohort_size: int) -> None:
        """Raise ConfigError if the settings do not fit the cohort size."""

    def open(self, folder: Path, *, cohort_size: int, expected: bool) -> None:
        """Start a run: open or create its secret; `expected` means that it was used before."""
        self.cohort_size = cohort_size
        self._secret = open_secret(folder, given=self.secret_file, expected=expected)

    @property
    def secret(self) -> Secret:
        """The run's secret.

        Raises:
            FedSignError: it is not open, because the strategy is used outside of a run.
        """
        if self._secret is None:
            raise FedSignError(
                "a strategy with privacy was used without a run's secret; open it with `privacy.open(folder, ...)`."
            )
        return self._secret

    def sampler(self, round: int) -> np.random.Generator | None:
        """The generator that draws the cohort; None for the experiment's own."""
        return self.secret.generator("sampling", round) if self.sampling == "secret" else None

    def gather(
        self, replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
    ) -> Aggregate | None:
        """Aggregate to served + noisy mean update; weights are uniform, and missing replies are zero updates."""
        self._released = {}
        size, secret, each = self.cohort_size, self.secret, one_by_one(replies)
        first = next(each, None)
        if first is None:
            return None
        # a reply is needed for the names of auxiliary tensors; what it does not hold is frozen
        layout = Layout({name: served[name] for name in first.tensors}, first.extra)
        total, num_below, partitions = np.zeros_like(layout.served), 0, list[int]()
        for reply in chain([first], each):
            update, is_below = clipped(layout.update(reply), self.clip_norm)
            total += update  # float64 in the order of the requests: the noise is bound to every bit
            num_below += is_below
            partitions.append(reply.partition)
        # The noise is bound to the exact sum that it hides; see [Note: bound to what it hides] in
        # fedsign.privacy.secret.
        labels = (round, digest_of([layout.served, total], self.clip_norm, num_below, *partitions))
        self._released = {MODEL: secret.tag("released", *labels)}
        std = self.update_multiplier(size) * self.clip_norm
        noisy = total + std * secret.normal(len(total), "update", *labels) if std else total
        # size, even if replies are missing: the sensitivity must not depend on failures
        mean, extra = layout.tensors(layout.served + noisy / size)
        self.follow(num_below, len(partitions), cohort_size=size, secret=secret, labels=labels)
        return Aggregate(
            round=round,
            served=served,
            mean={**served, **mean},
            extra=extra,
            roles=first.roles,
            num_replies=size,
            num_clients=num_clients,
            num_sent={name: size * (name in mean) for name in first.roles},
            weight_sent={name: float(size * (name in mean)) for name in first.roles},
        )

    def released(self, sampled: Sequence[int]) -> dict[str, str]:
        """The last round's releases: holder -> tag."""
        return self._released

    def update_multiplier(self, cohort_size: int) -> float:
        """The noise on the sum of updates, in units of the clipping norm."""
        return self.noise_multiplier

    def follow(
        self, num_below: int, num_replies: int, *, cohort_size: int, secret: Secret, labels: Iterable[object]
    ) -> None:
        """Adapt after a round in which `num_below` of `num_replies` updates were not clipped."""

    def metrics(self) -> dict[str, float]:
        """Metrics for the next round's record."""
        return {}
