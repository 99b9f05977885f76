"""Workers: the clients of a round spread over several processes."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="the clients of a round trained in several processes",
    modules=("clients.workers",),
    extends={"local_trainer": "clients.workers.provider:WorkersProvider"},
)
