"""A client's half of local differential privacy: what leaves it is clipped, and covered with its own noise.

It comes first among a client's conducts, since nothing that another one does to a private reply can undo it.
A malicious client does not care for it (`clients.robustness.attack`).
"""

from collections.abc import Callable
from pathlib import Path

from fedsign.config import ExperimentConfig
from fedsign.privacy.local import Local
from fedsign.privacy.section import PrivacyPart
from fedsign.records import Failure, TrainReply, TrainRequest


class ClientPrivacy:
    """A Conduct (`clients.conduct`).  `folder` holds the node's secret."""

    def __init__(self, rule: Local, folder: Path, *, is_malicious: Callable[[int], bool]) -> None:
        self._rule, self._is_malicious = rule, is_malicious
        self._secret = rule.secret_in(folder)

    def concerns(self, request: TrainRequest) -> bool:
        """See Conduct."""
        return not self._is_malicious(request.partition)

    def before(self, request: TrainRequest) -> Failure | None:
        """Nothing."""
        return None

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply | Failure:
        """Clip and cover."""
        return self._rule.applied(reply, request.tensors, self._secret)


def privacy_of(config: ExperimentConfig, folder: Path, *, is_malicious: Callable[[int], bool]) -> ClientPrivacy | None:
    """The clients' half of an experiment's privacy; None without, and with a server that is trusted."""
    rule = PrivacyPart.of(config).build()
    return ClientPrivacy(rule, folder, is_malicious=is_malicious) if isinstance(rule, Local) else None
