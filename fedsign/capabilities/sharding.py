"""Sharding: one client's model and batch over several processes: PaRO."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="one client's model and batch over several processes: PaRO",
    modules=(
        "fedsign.capabilities.sharding",
        "fedsign.report.sharding_chart",
        "fedsign.sharding",
        "clients.sharding",
        "simulations.sharding",
    ),
    requires={
        "workers": "ranks share tensors and data through the same memory",
    },
    commands={
        "estimate sharding": "simulations.sharding.command:sharding",
        "worker": "simulations.sharding.command:worker",
    },
)
