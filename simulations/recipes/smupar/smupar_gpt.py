"""The small language model of the SmuPar recipes: two layers, tied embeddings, learned positions, base width 64.

Paper: Dey et al. 2024 (arXiv 2405.15743), whose networks are 16 times as wide and read SlimPajama.  Here the data are
characters of texts that ship with Python. Heads have width 32. The initial standard deviation is that of the paper's
Table 3, the multipliers are 1; AdamW as in the authors' code: betas 0.9 and 0.95, weight decay 0.1, gradients clipped
at 1.
"""

from typing import Any

from torch import nn

from fedsign.config import ExperimentConfig, from_dict, merged
from simulations.recipes.cells import ONE_READER

HEAD_WIDTH, BASE_WIDTH, INIT_STD = 32, 64, 0.08665602
_CENTRAL: dict[str, Any] = {
    **ONE_READER,
    "name": "smupar",
    "data": {"name": "pytext", "block_length": 128},
    "client": {
        "local_steps": 1,
        "batch_size": 8,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "optimizer": {"name": "adamw", "beta1": 0.9, "beta2": 0.95},
    },
    "parameterization": {"name": "smupar", "base_width": BASE_WIDTH, "init_std": INIT_STD},
}


def experiment(*, width: int, lr: float, changes: dict[str, Any] | None = None) -> ExperimentConfig:
    """Return the experiment of a model of this width, with one client that has all data."""
    own = {"model": {"name": "gpt", "depth": 2, "width": width, "num_heads": width // HEAD_WIDTH, "bias": False}}
    return from_dict(merged(merged(_CENTRAL, own | {"client": {"lr": lr}}), changes or {}))


def hidden(model: nn.Module) -> list[str]:
    """Return the matrices of the blocks, the only sparse ones."""
    return [name for name, each in model.named_parameters() if name.startswith("blocks.") and each.dim() == 2]
