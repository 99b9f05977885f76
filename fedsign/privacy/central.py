"""Client-level differential privacy at a server that is trusted, with a fixed clipping norm.

Paper: McMahan et al. 2018 (arXiv 1710.06963), with a fixed number n of clients a round instead of Poisson sampling.
C -> clip_norm, z -> noise_multiplier, u_k: client k's update (`fedsign.privacy.clipping`):

    mean update = (1/n) (sum_k u_k min(1, C / |u_k|) + N(0, (z C)^2) in every coordinate)

n is `server.cohort_size`, whoever replies: a reply that is missing counts as a zero update, so that what one client can change
does not depend on who failed.  Weights are uniform, since with weights by samples a client with many would count for more.

It is a strategy's `Aggregator`: the strategy sees served + mean update, and nothing else of the clients, and all that it
makes of it is as private.

Who is sampled: with `sampling = secret` by numbers from the run's secret, and the budget counts on nobody knowing who
took part; with `public` from the experiment's seed, as without privacy, and the budget does not.
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

MODEL = "model"  # what a round with central privacy releases; with local privacy, each client's reply


@dataclass(kw_only=True, eq=False)
class Central(Aggregator):
    """The rule; `clip_norm` is that of the next round."""

    prefix = "privacy/"
    takes_substitutes: ClassVar = False  # the account counts on the chance with which a client is drawn
    trusts_server: ClassVar = True
    withheld: ClassVar = (
        "train_loss",
        "update_norm",
        "client_drift",
    )  # figures of unclipped updates, left out of a record

    clip_norm: ClipNorm
    noise_multiplier: NoiseMultiplier
    delta: Delta
    sampling: Sampling = "secret"
    secret_file: str = ""
    cohort_size: int = field(init=False, default=0)
    _secret: Secret | None = field(init=False, default=None, repr=False)
    _released: dict[str, str] = field(init=False, default_factory=dict)

    def check(self, *, cohort_size: int) -> None:
        """Raise ConfigError where the settings do not suit the cohort."""

    def open(self, folder: Path, *, cohort_size: int, expected: bool) -> None:
        """Begin a run: take its secret, or make one; `expected`: it has been used before."""
        self.cohort_size = cohort_size
        self._secret = open_secret(folder, given=self.secret_file, expected=expected)

    @property
    def secret(self) -> Secret:
        """The run's.

        Raises:
            FedSignError: it has not been opened: a strategy is used outside of a run.
        """
        if self._secret is None:
            raise FedSignError(
                "a strategy with privacy was used without a run's secret; open it with `privacy.open(folder, ...)`."
            )
        return self._secret

    def sampler(self, round: int) -> np.random.Generator | None:
        """What the cohort is drawn with; None for the experiment's own stream."""
        return self.secret.generator("sampling", round) if self.sampling == "secret" else None

    def gather(
        self, replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
    ) -> Aggregate | None:
        """The replies as served + noisy mean update; weights are uniform, and missing replies count as zero updates."""
        self._released = {}
        size, secret, each = self.cohort_size, self.secret, one_by_one(replies)
        first = next(each, None)
        if first is None:
            return None
        layout = Layout(served, first.extra)
        total, num_below, partitions = np.zeros_like(layout.served), 0, list[int]()
        for reply in chain([first], each):
            update, is_below = clipped(layout.update(reply), self.clip_norm)
            total += update
            num_below += is_below
            partitions.append(reply.partition)
        labels = (round, digest_of([layout.served, total], self.clip_norm, num_below, *partitions))
        self._released = {MODEL: secret.tag("released", *labels)}
        std = self.update_multiplier(size) * self.clip_norm
        noisy = total + std * secret.normal(len(total), "update", *labels) if std else total
        mean, extra = layout.tensors(layout.served + noisy / size)
        self.follow(num_below, len(partitions), cohort_size=size, secret=secret, labels=labels)
        return Aggregate(
            round=round,
            served=served,
            mean=mean,
            extra=extra,
            roles=first.roles,
            num_replies=size,
            num_clients=num_clients,
            num_sent=dict.fromkeys(first.roles, size),
            weight_sent=dict.fromkeys(first.roles, float(size)),
        )

    def released(self, asked: Sequence[int]) -> dict[str, str]:
        """What the last round released, by what can be told apart: name -> tag, equal tags for equal content."""
        return self._released

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
