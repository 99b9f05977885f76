"""Clients that train a part of the model at a time: what they hold."""

from fedsign.optim.base import trains_part
from fedsign.parts import Holdings
from fedsign.workload import Workload


def holdings_for(workload: Workload) -> Holdings | None:
    """An account of what clients hold where they train parts; None where every reply is a whole model."""
    return Holdings() if trains_part(workload.config.client.optimizer.name) else None
