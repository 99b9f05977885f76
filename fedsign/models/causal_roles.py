"""The roles of tensors and modules in models of `transformers`, for `fedsign.parameterization`.

Known are decoders of the form of LLaMA (Llama, Mistral, Qwen2, Qwen3) and GPT-NeoX (Pythia).  Their embeddings enter
the residual stream unscaled, every block adds to it twice, and attention multiplies its logits by `scaling`.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Names of modules: `decoder` in the network, the others in it or in a block; `query` scales the logits."""

    decoder: str
    embedding: str
    norm: str
    attention: str
    query: str
    adding: tuple[str, ...]
    fused_query: bool = False


_LLAMA = _Family(
    decoder="model",
    embedding="embed_tokens",
    norm="norm",
    attention="self_attn",
    query="q_proj",
    adding=("self_attn.o_proj", "mlp.down_proj"),
)
_NEOX = _Family(
    decoder="gpt_neox",
    embedding="embed_in",
    norm="final_layer_norm",
    attention="attention",
    query="query_key_value",
    adding=("attention.dense", "mlp.dense_4h_to_h"),
    fused_query=True,
)
# Qwen3 normalizes queries, after which only the norm's weight can scale them
_QWEN3 = replace(_LLAMA, query="q_norm")
_FAMILIES = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _QWEN3, "gpt_neox": _NEOX}


def roles_of_network(network: nn.Module, path: str) -> dict[str, Any] | None:
    """Fields of `fedsign.parameterization.roles.ModelRoles` of a network at `path`; None for other families."""
    config: Any = network.config
    family = _FAMILIES.get(config.model_type)
    if family is None:
        return None
    decoder = f"{path}.{family.decoder}"
    blocks = [f"{decoder}.layers.{index}" for index in range(config.num_hidden_layers)]
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "width": config.hidden_size,
        "embedding": (f"{decoder}.{family.embedding}.weight",),
        # GPT-NeoX's head has the latter name in earlier versions
        "unembedding": (f"{path}.lm_head.weight", f"{path}.embed_out.weight"),
        "residual": tuple(f"*.{name}.weight" for name in family.adding),
        "depth": config.num_hidden_layers,
        "inputs": (f"{decoder}.{family.embedding}",),
        "outputs": (f"{decoder}.{family.norm}",),
        "output_is_a_norm": True,
        "attention": {f"{block}.{family.attention}": head_width for block in blocks},
        "attention_scale": "scaling",
        "query": family.query,
        "num_fused_heads": config.num_attention_heads if family.fused_query else 0,
        "watched": tuple(f"{block}.{name}" for block in blocks for name in family.adding),
    }
