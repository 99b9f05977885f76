"""Workers: the clients of a round trained by several processes."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="the clients of a round trained by several processes",
    modules=(
        "fedsign.capabilities.workers",
        "clients.workers",
    ),
    extends={"local_trainer": "clients.workers.provider:WorkersProvider"},
)
