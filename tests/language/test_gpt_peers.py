"""Our decoder gives the logits of `transformers`' GPT-2 and LLaMA with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsign.data.text import libraries as llm
from tests.language.test_gpt import LLAMA, build, tokens

pytest.importorskip("transformers")
transformers = llm.transformers("this test")


class ExactNorm(nn.Module):
    """LLaMA's norm without its detour over float32, which would hide everything below 1e-7."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt()


def with_exact_norms(model: nn.Module) -> nn.Module:
    kind = transformers.models.llama.modeling_llama.LlamaRMSNorm
    for name, module in list(model.named_modules()):
        if isinstance(module, kind):
            model.set_submodule(name, ExactNorm(module.weight, module.variance_epsilon))
    return model


def llama(**settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        rms_norm_eps=1e-5,
        **settings,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def randomized(model: nn.Module, seed: int) -> nn.Module:
    """No weight is left at a 0 or a 1 that would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.05)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_with_llamas_settings_the_logits_are_llamas(num_kv_heads: int, tied: bool) -> None:
    ours = randomized(build(**{**LLAMA, "tied": tied}, num_kv_heads=num_kv_heads, ffn_width=96), 0)
    own = {"num_key_value_heads": num_kv_heads, "tie_word_embeddings": tied}
    theirs = llama(**own)
    renamed = {
        "embedding.": "model.embed_tokens.",
        "norm.": "model.norm.",
        "head.": "lm_head.",
        "blocks.": "model.layers.",
    }
    inner = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    }
    state = {}
    for name, tensor in ours.state_dict().items():
        start = next(prefix for prefix in renamed if name.startswith(prefix))
        name = renamed[start] + name.removeprefix(start)
        for mine, its in inner.items():
            name = name.replace(f".{mine}.", f".{its}.")
        state[name] = tensor
    missing = theirs.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and missing.missing_keys == (["lm_head.weight"] if tied else [])
    logits = ours(tokens())
    torch.testing.assert_close(theirs(tokens()).logits, logits, rtol=1e-4, atol=1e-4)
    exact = with_exact_norms(theirs.double())(tokens()).logits
    torch.testing.assert_close(exact, ours.double()(tokens()), rtol=0, atol=1e-10)
    assert exact.abs().max() > 1


def test_with_gpt2s_settings_the_logits_are_gpt2s() -> None:
    """GPT-2 keeps query, key and value in one matrix, and all of them transposed."""
    ours = randomized(build(), 0).double()
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=12, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    mine = ours.state_dict()
    state = {"transformer.wte.weight": mine["embedding.weight"], "transformer.wpe.weight": mine["positions.weight"]}
    for part in ("weight", "bias"):
        state[f"transformer.ln_f.{part}"] = mine[f"norm.{part}"]
        for at in range(2):
            block, its = f"blocks.{at}", f"transformer.h.{at}"
            of_qkv = [mine[f"{block}.attention.{name}.{part}"] for name in ("query", "key", "value")]
            state[f"{its}.attn.c_attn.{part}"] = torch.cat(of_qkv).T if part == "weight" else torch.cat(of_qkv)
            for name, other in (("attention.out", "attn.c_proj"), ("ffn.up", "mlp.c_fc"), ("ffn.down", "mlp.c_proj")):
                tensor = mine[f"{block}.{name}.{part}"]
                state[f"{its}.{other}.{part}"] = tensor.T if part == "weight" else tensor
            for name, other in (("attention_norm", "ln_1"), ("ffn_norm", "ln_2")):
                state[f"{its}.{other}.{part}"] = mine[f"{block}.{name}.{part}"]
    found = theirs.load_state_dict(state, strict=False)
    assert found.missing_keys == ["lm_head.weight"] and not found.unexpected_keys
    logits = theirs(tokens()).logits
    torch.testing.assert_close(logits, ours(tokens()), rtol=0, atol=1e-10)
    assert logits.abs().max() > 1
