"""A client's half of local differential privacy: what leaves it is clipped, and covered with its own noise.

It comes before other middleware, since nothing that the others do to a private reply can undo it.
"""

from pathlib import Path

from clients.middleware import ClientMiddleware
from fedsign.privacy.local import Local
from fedsign.privacy.secret import Secret
from fedsign.privacy.section import PrivacyPart
from fedsign.records import TrainReply, TrainRequest
from fedsign.workload import Workload


class ClientPrivacy(ClientMiddleware):
    """`secret` is the node's."""

    def __init__(self, rule: Local, secret: Secret) -> None:
        self._rule, self._secret = rule, secret

    def concerns(self, request: TrainRequest) -> bool:
        """Everyone."""
        return True

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply:
        """Clip and cover."""
        return self._rule.applied(reply, request.tensors, self._secret)


def middleware_of(workload: Workload, *, in_process: bool, folder: Path) -> list[ClientMiddleware]:
    """At the extension point `client_middleware`."""
    rule = PrivacyPart.of(workload.config).build()
    return [ClientPrivacy(rule, rule.secret_in(folder))] if isinstance(rule, Local) else []
