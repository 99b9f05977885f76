"""Sharding: one client's model and batch sharded over several processes: PaRO."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="one client's model and batch sharded over several processes (PaRO)",
    modules=(
        "fedsign.sharding",
        "clients.sharding",
        "simulations.sharding",
    ),
    sections={"client.sharding": "fedsign.sharding.section:ShardingSection"},
    requires={
        "workers": "ranks share tensors and data through the same memory",
    },
    examples={"sharded clients": {"client": {"sharding": {"ranks": 2, "strategy": "IIG"}}}},
    extends={
        "local_trainer": "clients.sharding.provider:ShardingProvider",
        "rules": "clients.sharding.rules:RULES",
        "site_table": "clients.sharding.site:SITE_MACHINES",
    },
    commands={
        "estimate sharding": "simulations.sharding.command:sharding",
        "worker": "simulations.sharding.command:worker",
    },
    files=("docs/how-to/shard-a-model.md",),
)
