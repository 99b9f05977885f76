"""Memory: estimated and measured memory of a training step."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="memory of a training step, estimated and measured",
    modules=(
        "fedsign.memory",
        "simulations.memory",
    ),
    requires={
        "sharding": "a step is estimated for one rank of a sharded client",
        "partial": "LISA, LoRA and GaLore are methods that are estimated",
        "language": "the models that are known by name are decoders",
    },
    commands={
        "estimate memory": "simulations.memory.command:memory",
    },
    files=("docs/how-to/estimate-memory.md",),
)
