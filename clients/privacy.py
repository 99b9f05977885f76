"""The client side of local differential privacy: clip each reply and add noise before it leaves the client.

It runs before other middleware, because post-processing a private reply cannot undo its privacy.
"""

from pathlib import Path

from clients.middleware import ClientMiddleware
from fedsign.privacy.budget import NAME as LEDGER
from fedsign.privacy.local import Local
from fedsign.privacy.secret import Secret
from fedsign.privacy.section import PrivacyPart
from fedsign.records import TrainReply, TrainRequest
from fedsign.workload import Workload


class ClientPrivacy(ClientMiddleware):
    """Middleware that makes replies private; `secret` is the node's."""

    def __init__(self, rule: Local, secret: Secret) -> None:
        self._rule, self._secret = rule, secret

    def concerns(self, request: TrainRequest) -> bool:
        """Every client."""
        return True

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply:
        """Clip the update and add noise."""
        return self._rule.applied(reply, request.tensors, self._secret)


def middleware_of(workload: Workload, *, in_process: bool, folder: Path) -> list[ClientMiddleware]:
    """The extension point `client_middleware`; active with local privacy."""
    rule = PrivacyPart.of(workload.config).build()
    if not isinstance(rule, Local):
        return []
    # a run's ledger says whether noise was drawn; a node has only the mark of its key
    is_used = in_process and (folder.parent / LEDGER).exists()
    return [ClientPrivacy(rule, rule.secret_in(folder, expected=is_used))]
