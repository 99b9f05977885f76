"""Partial: clients that train and send part of the model: LISA, LoRA, GaLore."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="clients that train and send part of the model: LISA, LoRA, GaLore",
    modules=(
        "fedsign.optim.blocks",
        "fedsign.optim.galore",
        "fedsign.optim.layer_draws",
        "fedsign.optim.lisa",
        "fedsign.optim.lora",
        "fedsign.optim.lora_experts",
        "fedsign.partial",
        "clients.partial",
        "simulations.partial",
    ),
    columns=("aggregation_error",),
    rows={
        "optimizer": {
            "lora": ("fedsign.optim.lora:lora", "AdamW on low-rank adapters; only the adapters are sent"),
            "galore": ("fedsign.optim.galore:galore", "Adam in a low-rank projection of each matrix's gradient"),
            "lisa": ("fedsign.optim.lisa:lisa", "AdamW on a few random layers at a time, drawn anew every K steps"),
        },
    },
    files=("docs/how-to/lisa.md",),
    examples={
        "part of the model": {
            "model": {"name": "mlp", "hidden": [8, 8]},
            "client": {"optimizer": {"name": "lisa", "blocks": "0,2", "num_sampled_layers": 1}},
        },
    },
    extends={
        "client_middleware": "clients.partial.received:middleware_of",
        "round_hook": "simulations.partial:round_hook",
        "rules": "clients.partial.rules:RULES",
        "strategy_transform": "simulations.partial:prepare",
        "update_encoding": "fedsign.partial.updates:partial_updates",
        "working_model": "clients.partial.model:part_model",
    },
)
