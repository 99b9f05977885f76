"""Local differential privacy: each client clips its update and adds noise before it replies.

C -> clip_norm, z -> noise_multiplier, u_k is client k's update (`fedsign.privacy.clipping`), theta the received model:

    reply = theta + u_k min(1, C / |u_k|) + N(0, (z C)^2) in every coordinate

Nobody is trusted, not even the server, so a reply omits its training loss and number of samples.  The noise of a mean
over n clients is n^(1/2) times what a trusted server would need.

A client draws noise from its node's own secret in the folder of client states ([Note: bound to what it hides] in
`fedsign.privacy.secret`).  A server that asks twice in one round, with two models, gets independent noise.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from fedsign.federation.aggregation import Aggregate, Aggregator, Weigh, weighted_mean
from fedsign.numerics import as_real
from fedsign.privacy.clipping import Layout, clipped
from fedsign.privacy.secret import Secret, digest_of, open_secret
from fedsign.privacy.settings import ClipNorm, Delta, NoiseMultiplier
from fedsign.records import Reply, Tensors, TrainReply, one_by_one


@dataclass(kw_only=True, eq=False)
class Local(Aggregator):
    """Local differential privacy.  The server averages as usual and identifies replies for the ledger."""

    prefix = "privacy/"
    trusts_server: ClassVar = False
    withheld: ClassVar = ("train_loss",)  # not sent by clients

    clip_norm: ClipNorm
    noise_multiplier: NoiseMultiplier
    delta: Delta
    secret_file: str = ""
    _digests: dict[str, str] = field(init=False, default_factory=dict)

    def secret_in(self, folder: Path, *, expected: bool = False) -> Secret:
        """A node's secret, created on first use; `expected` means that it was used before."""
        return open_secret(folder, given=self.secret_file, expected=expected)

    def applied(self, reply: TrainReply, received: Tensors, secret: Secret) -> TrainReply:
        """The reply, clipped and noised, as it may leave the client."""
        layout = Layout({name: received[name] for name in reply.tensors}, reply.extra)
        update, _ = clipped(layout.update(reply), self.clip_norm)
        if std := self.noise_multiplier * self.clip_norm:
            # bound to the model received, too: two models in one round get independent noise
            labels = (reply.partition, reply.round, digest_of([layout.served, update]))
            update = update + std * secret.normal(len(update), "reply", *labels)
        tensors, extra = layout.tensors(layout.served + update)
        return replace(reply, tensors=tensors, extra=extra, num_examples=1, metrics={})

    def gather(
        self, replies: Iterable[Reply], weigh: Weigh, *, round: int, served: Tensors, num_clients: int
    ) -> Aggregate | None:
        """The weighted mean of the replies."""
        self._digests = {}
        return weighted_mean(self._each(replies), weigh, round=round, served=served, num_clients=num_clients)

    def _each(self, replies: Iterable[Reply]) -> Iterator[TrainReply]:
        for reply in one_by_one(replies):
            tensors = (*reply.tensors.values(), *reply.extra.values())
            # replies are private already, so a plain digest is a safe tag
            self._digests[str(reply.partition)] = digest_of(as_real(tensor).double().numpy() for tensor in tensors)[:16]
            yield reply

    def released(self, sampled: Sequence[int]) -> dict[str, str]:
        """Client -> tag of its reply; empty if none arrived, since it may still have been sent."""
        return {str(client): self._digests.get(str(client), "") for client in sampled}
