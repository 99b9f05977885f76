"""The server's half of differential privacy in a run: a round's replies clipped, added up and covered with noise.

A strategy of ours that has a `CentralPrivacy` gathers its replies with it instead of a mean of its own; one that has a
`LocalPrivacy` only lets it see what came, since the clients have made it private themselves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsign.errors import FedSignError
from fedsign.privacy.central import Central
from fedsign.privacy.clipping import Layout, Vector, clipped
from fedsign.privacy.secret import Secret, digest_of, open_secret
from fedsign.records import Failure, Role, Tensors, TrainReply

MODEL = "model"  # what a round with central privacy releases; with local privacy, each client's reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """What a round made of its replies; all that may be looked at."""

    mean: Tensors
    extra: Tensors
    roles: Mapping[str, Role]


class CentralPrivacy:
    """A rule with its secret: clips, adds up, covers, and says what it has released."""

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

    def gather(self, round: int, served: Tensors, replies: Iterable[TrainReply | Failure]) -> Released | None:
        """The replies as served + noisy mean update; None if nobody replied."""
        self._released = {}
        total = _ClippedSum(served, self.rule.clip_norm)
        for reply in replies:
            if isinstance(reply, TrainReply):
                total.add(reply)
        if not total.partitions:
            return None
        rule, size, secret = self.rule, self.cohort_size, self.secret
        labels = (round, total.digest(rule.clip_norm))
        self._released = {MODEL: secret.tag("released", *labels)}
        std = rule.update_multiplier(size) * rule.clip_norm
        released = total.mean(size, noise=std * secret.normal(len(total.sum), "update", *labels) if std else None)
        rule.follow(total.num_below, len(total.partitions), cohort_size=size, secret=secret, labels=labels)
        return released

    def released(self, asked: Sequence[int]) -> dict[str, str]:
        """What the last round released, by what can be told apart: name -> tag, equal tags for equal content."""
        return self._released


class _ClippedSum:
    """One round's updates, clipped and added up as they come."""

    def __init__(self, served: Tensors, clip_norm: float) -> None:
        self._served, self._clip_norm = served, clip_norm
        self._layout = Layout(served, {})
        self._before: Vector = np.zeros(0)
        self.sum: Vector = np.zeros(0)
        self._roles: Mapping[str, Role] = {}
        self.partitions: list[int] = []
        self.num_below = 0  # updates that were not clipped

    def add(self, reply: TrainReply) -> None:
        """Take one client's in.

        Raises:
            ReplyError: something else travels besides than with the first.
        """
        if not self.partitions:
            self._begin(reply.extra)
            self._roles = reply.roles
        update, is_below = clipped(self._layout.vector(reply.tensors, reply.extra) - self._before, self._clip_norm)
        self.sum += update
        self.num_below += is_below
        self.partitions.append(reply.partition)

    def _begin(self, extra: Mapping[str, Tensor]) -> None:
        self._layout = Layout(self._served, extra)
        self._before = self._layout.vector(
            self._served, {name: torch.zeros_like(tensor) for name, tensor in extra.items()}
        )
        self.sum = np.zeros_like(self._before)

    def digest(self, clip_norm: float) -> str:
        """Of all that the release depends on."""
        return digest_of([self._before, self.sum], clip_norm, self.num_below, *self.partitions)

    def mean(self, size: int, *, noise: Vector | None) -> Released:
        """Served + (sum + noise) / size."""
        total = self.sum if noise is None else self.sum + noise
        mean, extra = self._layout.tensors(self._before + total / size)
        return Released(mean=mean, extra=extra, roles=self._roles)
