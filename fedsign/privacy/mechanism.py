"""The server's half of differential privacy in a run: a round's replies clipped, added up and covered with noise.

It is a strategy's `Aggregator`: the strategy sees served + noisy mean update, and nothing else of the clients.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedsign.errors import FedSignError
from fedsign.federation.aggregation import Aggregate, Aggregator, Weigh
from fedsign.privacy.central import Central
from fedsign.privacy.clipping import Layout, Vector, clipped
from fedsign.privacy.secret import Secret, digest_of, open_secret
from fedsign.records import Reply, Tensors, TrainReply, one_by_one

MODEL = "model"  # what a round with central privacy releases; with local privacy, each client's reply


class CentralPrivacy(Aggregator):
    """A rule with its secret: clips, adds up, covers, and says what it has released."""

    prefix = "privacy/"

    def __init__(self, rule: Central, *, cohort_size: int) -> None:
        rule.check(cohort_size=cohort_size)
        self.rule, self.cohort_size = rule, cohort_size
        self._secret: Secret | None = None
        self._released: dict[str, str] = {}

    def open(self, folder: Path, *, expected: bool) -> None:
        """Take the run's secret, or make one; `expected`: it has been used before."""
        self._secret = open_secret(folder, given=self.rule.secret_file, expected=expected)

    @property
    def secret(self) -> Secret:
        """The run's.

        Raises:
            FedSignError: it has not been opened: a strategy is used outside of a run.
        """
        if self._secret is None:
            raise FedSignError(
                "a strategy with privacy was used without a run's secret; open it with `privacy.open(folder)`."
            )
        return self._secret

    def sampler(self, round: int) -> np.random.Generator | None:
        """What the cohort is drawn with; None for the experiment's own stream."""
        return self.secret.generator("sampling", round) if self.rule.sampling == "secret" else None

    def gather(
        self, replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
    ) -> Aggregate | None:
        """The replies as served + noisy mean update; weights are uniform, and missing replies count as zero updates."""
        self._released = {}
        rule, size, secret = self.rule, self.cohort_size, self.secret
        total: _ClippedSum | None = None
        for reply in one_by_one(replies):
            total = total or _ClippedSum(served, reply)
            total.add(reply, rule.clip_norm)
        if total is None:
            return None
        labels = (round, total.digest(rule.clip_norm))
        self._released = {MODEL: secret.tag("released", *labels)}
        std = rule.update_multiplier(size) * rule.clip_norm
        mean, extra = total.mean(size, noise=std * secret.normal(len(total.sum), "update", *labels) if std else None)
        rule.follow(total.num_below, len(total.partitions), cohort_size=size, secret=secret, labels=labels)
        return Aggregate(
            round=round,
            served=served,
            mean=mean,
            extra=extra,
            roles=total.roles,
            num_replies=size,
            num_clients=num_clients,
            num_sent=dict.fromkeys(total.roles, size),
            weight_sent=dict.fromkeys(total.roles, float(size)),
        )

    def state_dict(self) -> Tensors:
        """The rule's."""
        return self.rule.state_dict()

    def load_state_dict(self, state: Tensors) -> None:
        """Take it back."""
        self.rule.load_state_dict(state)

    def released(self, asked: Sequence[int]) -> dict[str, str]:
        """What the last round released, by what can be told apart: name -> tag, equal tags for equal content."""
        return self._released


class _ClippedSum:
    """One round's updates, clipped and added up as they come."""

    def __init__(self, served: Tensors, first: TrainReply) -> None:
        self._layout = Layout(served, first.extra)
        self.sum: Vector = np.zeros_like(self._layout.served)
        self.roles = first.roles
        self.partitions: list[int] = []
        self.num_below = 0  # updates that were not clipped

    def add(self, reply: TrainReply, clip_norm: float) -> None:
        """Take one client's in.

        Raises:
            ReplyError: something else travels besides than with the first.
        """
        update, is_below = clipped(self._layout.update(reply), clip_norm)
        self.sum += update
        self.num_below += is_below
        self.partitions.append(reply.partition)

    def digest(self, clip_norm: float) -> str:
        """Of all that the release depends on."""
        return digest_of([self._layout.served, self.sum], clip_norm, self.num_below, *self.partitions)

    def mean(self, size: int, *, noise: Vector | None) -> tuple[Tensors, Tensors]:
        """Served + (sum + noise) / size: the model, and what travels besides."""
        total = self.sum if noise is None else self.sum + noise
        return self._layout.tensors(self._layout.served + total / size)
