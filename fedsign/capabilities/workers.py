"""Workers: the clients of a round spread over several processes."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="the clients of a round trained by several processes",
    modules=("clients.workers",),
    extends={"local_trainer": "clients.workers.provider:WorkersProvider"},
)
