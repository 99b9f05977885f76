"""Partial: clients that train and send part of the model, or with less memory: LISA, LoRA, QLoRA, GaLore."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="clients that train part of the model, or with less memory: LISA, LoRA, QLoRA, GaLore, 8-bit AdamW",
    modules=(
        "fedsign.optim.adamw_8bit",
        "fedsign.optim.blocks",
        "fedsign.optim.bnb",
        "fedsign.optim.galore",
        "fedsign.optim.layer_draws",
        "fedsign.optim.lisa",
        "fedsign.optim.lora",
        "fedsign.optim.lora_experts",
        "fedsign.optim.nf4",
        "fedsign.partial",
        "clients.partial",
        "simulations.partial",
    ),
    columns=("aggregation_error",),
    extras=("bitsandbytes",),
    rows={
        "optimizer": {
            "adamw_8bit": ("fedsign.optim.adamw_8bit:adamw_8bit", "AdamW with moments in 8 bits, of bitsandbytes"),
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
