"""Export our language models as `transformers` networks with the same logits, which can be saved to a folder.

A decoder with rotary positions, RMS norms, and SwiGLU maps to LLaMA; one with learned positions, layer norms, and GELU
maps to GPT-2.  A GPT-2 always has biases, so missing ones become 0.  It stores query, key, and value in one matrix, and
its matrices as [in, out].
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.models.causal_lm import CausalLM
from fedsign.models.gpt import GPT

_NAME = "an export for `transformers`"
_NAMES = {  # family -> our name -> name in transformers
    "llama": {
        "embedding": "model.embed_tokens",
        "blocks": "model.layers",
        "attention_norm": "input_layernorm",
        "attention": "self_attn",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "out": "o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn": "mlp",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
    "gpt2": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks": "transformer.h",
        "attention_norm": "ln_1",
        "attention": "attn",
        "query": "c_attn",
        "out": "c_proj",
        "ffn_norm": "ln_2",
        "ffn": "mlp",
        "up": "c_fc",
        "down": "c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
}


def network_of(model: nn.Module, *, end_id: int) -> Any:
    """A `transformers` network with this model's weights; `end_id` is the token that begins and ends a text.

    Raises:
        ConfigError: `transformers` is missing or has no such model.
    """
    match model:
        case CausalLM():
            return model.network
        case GPT():
            return _of_gpt(model, end_id)
        case _:
            raise ConfigError(
                f"{_NAME} was asked of a {type(model).__name__}; "
                "expected a language model, of model.name=gpt or transformers."
            )


def kind_of(model: GPT) -> str:
    """The family of a decoder: `llama` or `gpt2`.

    Raises:
        ConfigError: it belongs to neither.
    """
    attention: Any = model.blocks[0].attention
    match model.design:
        case "rotary", "rms_norm", "swiglu":
            return "llama"
        case "learned", "layer_norm", "gelu" if attention.num_kv_heads == attention.num_heads:
            return "gpt2"
        case positions, norm, activation:
            raise ConfigError(
                f"{_NAME} knows no decoder with model.positions={positions}, model.norm={norm}, "
                f"model.activation={activation} and model.num_kv_heads={attention.num_kv_heads}; expected rotary, "
                "rms_norm and swiglu (LLaMA), or learned, layer_norm, gelu and all heads (GPT-2)."
            )


def _of_gpt(model: GPT, end_id: int) -> Any:
    kind = kind_of(model)
    library = llm.transformers(_NAME)
    config = _config(library, model, kind, end_id)
    network = library.AutoModelForCausalLM.from_config(config, dtype=model.embedding.weight.dtype)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in network.state_dict().items() if name.endswith(".bias")}
    tensors = (zeros if kind == "gpt2" else {}) | dict(_renamed(model, kind))
    if model.head is None:
        # load_state_dict is strict, and their state_dict lists a tied head under both names
        tensors["lm_head.weight"] = model.embedding.weight
    network.load_state_dict(tensors)
    return network.eval()


def _config(library: Any, model: GPT, kind: str, end_id: int) -> Any:
    block: Any = model.blocks[0]
    norm: Any = model.norm
    width, num_heads, ffn_width = model.embedding.embedding_dim, block.attention.num_heads, block.ffn.up.out_features
    shared = {
        "vocab_size": model.embedding.num_embeddings,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.head is None,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
    }
    if kind == "llama":
        has_bias = block.attention.query.bias is not None
        return library.LlamaConfig(
            hidden_size=width,
            intermediate_size=ffn_width,
            num_hidden_layers=len(model.blocks),
            num_attention_heads=num_heads,
            num_key_value_heads=block.attention.num_kv_heads,
            max_position_embeddings=model.num_positions,
            rms_norm_eps=norm.eps,
            rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},  # new in transformers 5
            attention_bias=has_bias,
            mlp_bias=has_bias,
            **shared,
        )
    rate = getattr(model.dropout, "p", 0.0)
    return library.GPT2Config(
        n_positions=model.num_positions,
        n_embd=width,
        n_layer=len(model.blocks),
        n_head=num_heads,
        n_inner=ffn_width,
        activation_function="gelu_new",  # the tanh form
        resid_pdrop=rate,
        embd_pdrop=rate,
        attn_pdrop=0.0,  # ours does not drop attention weights
        layer_norm_epsilon=norm.eps,
        **shared,
    )


def _renamed(model: GPT, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors under their names in `transformers`."""
    tensors, names = model.state_dict(), _NAMES[kind]
    for name, tensor in tensors.items():
        renamed = ".".join(names.get(part, part) for part in name.split("."))
        if kind == "gpt2" and name.startswith("blocks."):
            if ".key." in name or ".value." in name:
                # part of c_attn, which the query yields
                continue
            if ".query." in name:
                # GPT-2 splits c_attn's output in this order
                tensor = torch.cat([tensors[name.replace("query", part)] for part in ("query", "key", "value")])
            yield renamed, tensor.T if tensor.dim() == 2 else tensor  # Conv1D stores [in, out]
        else:
            yield renamed, tensor
