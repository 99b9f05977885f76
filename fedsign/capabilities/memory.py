"""Memory: estimated and measured memory of a run or a training step."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="memory of a run or a training step, estimated and measured",
    modules=(
        "fedsign.memory",
        "simulations.memory",
    ),
    requires={
        "sharding": "a sharded client's ranks are accounted for",
        "workers": "what workers share with the server is accounted for",
        "partial": "LISA, LoRA and GaLore are methods that are estimated",
        "language": "the models that are known by name are decoders",
    },
    extends={"run_check": "simulations.memory.check:run_check"},
    commands={
        "estimate memory": "simulations.memory.command:memory",
    },
    files=("docs/how-to/estimate-memory.md",),
)
