"""Models of `transformers` have the parameterization of our decoder, family by family."""

from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsign.config import from_dict
from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.models.causal_lm import CausalLM, untie
from fedsign.models.gpt import GPT
from fedsign.models.hugging_face import _renamed, network_of
from fedsign.models.transform import plain_model
from fedsign.parameterization.apply import parameterize, parameterized
from fedsign.parameterization.plan import plan_of
from fedsign.parameterization.roles import Role, roles_of_model
from fedsign.parameterization.schemes import Scheme, SmuPar
from fedsign.workload import Workload
from tests.language.test_gpt import LLAMA

pytest.importorskip("transformers")

WIDTH, HEAD, DEPTH, VOCABULARY = 32, 8, 2, 17
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": DEPTH}
SIZES |= {"num_attention_heads": WIDTH // HEAD, "bos_token_id": 0, "eos_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": HEAD},
    "GPTNeoX": {},
}
SCHEME = SmuPar(base_width=16, init_std=0.1, density=0.25)


def model_of(name: str) -> CausalLM:
    library = llm.transformers("this test")
    torch.manual_seed(0)
    network = library.AutoModelForCausalLM.from_config(getattr(library, f"{name}Config")(**SIZES, **FAMILIES[name]))
    untie(network)
    return CausalLM(network).eval()


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))


def test_a_llama_has_the_plan_of_our_decoder_with_its_settings() -> None:
    settings: dict[str, Any] = {"depth": DEPTH, "width": WIDTH, "num_heads": WIDTH // HEAD, "num_kv_heads": 2}
    ours = GPT((12,), VOCABULARY, **LLAMA, **settings)
    theirs = CausalLM(network_of(ours, end_id=0))
    plans = [plan_of(each, SCHEME) for each in (ours, theirs)]
    # tell our names by tensors that are all different
    with torch.no_grad():
        for index, parameter in enumerate(ours.parameters()):
            parameter.fill_(index)
    values = {int(tensor.flatten()[0]): f"network.{name}" for name, tensor in _renamed(ours, "llama")}
    expected = {values[index]: plans[0].tensors[name] for index, (name, _) in enumerate(ours.named_parameters())}
    assert plans[1].tensors == expected
    assert (plans[0].input, plans[0].output) == (plans[1].input, plans[1].output)
    assert list(plans[0].attention.values()) == list(plans[1].attention.values()) == [1 / HEAD] * DEPTH


@pytest.mark.parametrize("name", FAMILIES)
def test_start_and_rates_are_those_of_table_1(name: str) -> None:
    m_d, rho = WIDTH / 16, 0.25
    model = model_of(name)
    plan = plan_of(model, SCHEME)
    assert plan.output == 1 / m_d
    ends = {key: tensor.role for key, tensor in plan.tensors.items() if tensor.role not in (Role.HIDDEN, Role.VECTOR)}
    assert list(ends.values()) == ([Role.EMBEDDING] if name == "Mistral" else [Role.EMBEDDING, Role.UNEMBEDDING])
    num_adding = 0
    for key, tensor in plan.tensors.items():
        if tensor.role is not Role.HIDDEN:
            assert tensor.density == tensor.adam_rate == 1 and (tensor.role is Role.VECTOR) == (
                "norm" in key or "bias" in key
            )
            continue
        adds = key.endswith(("o_proj.weight", "down_proj.weight", "attention.dense.weight", "4h_to_h.weight"))
        num_adding += adds
        assert tensor.init_std == pytest.approx(0.1 / sqrt(m_d * rho) / (sqrt(2 * DEPTH) if adds else 1)), key
        assert tensor.adam_rate == pytest.approx(1 / (m_d * rho)) and tensor.density == rho
    assert num_adding == 2 * DEPTH


@pytest.mark.parametrize("name", FAMILIES)
def test_at_the_base_only_the_start_differs_from_the_standard(name: str) -> None:
    """At its base width, density, and head width, the multipliers are 1."""
    model, plain = model_of(name), model_of(name)
    parameterize(model, SmuPar(base_width=WIDTH, base_head_width=HEAD, init_std=0.1), seed=0)
    parameterize(plain, Scheme(init_std=0.1), seed=0)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens()), plain(tokens()))


@pytest.mark.parametrize("name", FAMILIES)
def test_multipliers_act_and_fold_into_the_weights(name: str) -> None:
    model, plain = model_of(name), model_of(name)
    parameterize(model, SmuPar(base_width=8, init_std=0.1, density=0.5, alpha_input=3.0, alpha_output=2.0), seed=0)
    generator = torch.Generator().manual_seed(3)
    found = parameterized(model)
    assert found is not None and len(found.masks) >= 4 * DEPTH
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    scales = {each.scaling for each in model.modules() if hasattr(each, "scaling") and isinstance(each.scaling, float)}
    assert 1 / HEAD in scales and HEAD**-0.5 not in scales
    expected = model(tokens())
    plain.load_state_dict(model.state_dict())
    assert (plain(tokens()) - expected).abs().max() > 0.1, "not vacuous"
    plain.load_state_dict(plain_model(model).state_dict())
    torch.testing.assert_close(plain(tokens()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_watched_are_the_outputs_that_add_to_the_stream(name: str) -> None:
    model = model_of(name)
    watched = [model.get_submodule(each) for each in roles_of_model(model).watched]
    assert len(watched) == 2 * DEPTH and all(isinstance(each, nn.Linear) for each in watched)


def experiment(**model: Any) -> dict[str, Any]:
    return {
        "task": "language",
        "metrics": ["perplexity"],
        "data": {"name": "pytext", "tokenizer": "byte", "block_length": 16},
        "model": {"name": "transformers", **model},
        "parameterization": {"name": "smupar", "base_width": 16, "density": 0.25},
        "partition": {"name": "iid", "num_clients": 2},
        "server": {"cohort_size": 1},
    }


def test_a_folders_weights_are_not_drawn_anew(tmp_path: Path) -> None:
    library = llm.transformers("this test")
    config = library.LlamaConfig(**{**SIZES, "vocab_size": 257}, **FAMILIES["Llama"])
    library.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"would draw its weights anew; set model\.config=.* for a random start"):
        Workload(from_dict(experiment(path=str(tmp_path)))).make_model()
    model = Workload(from_dict(experiment(config=str(tmp_path)))).make_model()
    found = parameterized(model)
    assert found is not None and len(found.masks) == 7 * DEPTH


def test_other_families_are_still_a_sentence() -> None:
    library = llm.transformers("this test")
    network = library.AutoModelForCausalLM.from_config(library.GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8))
    untie(network)
    with pytest.raises(ConfigError, match=r"the roles of .* in a GemmaRMSNorm are not known"):
        roles_of_model(CausalLM(network))
