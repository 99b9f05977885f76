"""LoRA adapts the experts of a mixture, with the outputs of `peft`, and names what `all_linear` does not cover."""

import copy
import logging
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.models.causal_lm import CausalLM, untie
from fedsign.models.transform import plain_model, transforms_of
from fedsign.optim.lora import Adapters, _warn, adapt
from fedsign.seeding import Purpose, global_stream
from tests.partial.test_lora import SETTINGS

if find_spec("peft") is None:
    pytest.skip("peft is not installed", allow_module_level=True)

RANK, EXPERTS = SETTINGS["rank"], 4
SIZES = {"vocab_size": 17, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "bos_token_id": 0}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 64, "eos_token_id": 1, "pad_token_id": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 8},  # experts [num, in, out], and biases
    "Qwen2Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
}


def mixture(name: str) -> CausalLM:
    library = llm.transformers("this test")
    with global_stream(0, Purpose.MODEL):
        network = library.AutoModelForCausalLM.from_config(getattr(library, f"{name}Config")(**SIZES, **MIXTURES[name]))
    untie(network)
    return CausalLM(network)


def adapted(name: str, **changes: Any) -> CausalLM:
    model = mixture(name)
    with global_stream(0, Purpose.MODEL):
        adapt(model, {**SETTINGS, **changes})
    return model


def moved(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def tokens() -> Tensor:
    return torch.randint(17, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MIXTURES)
def test_outputs_and_gradients_are_those_of_peft(name: str) -> None:
    base, model = mixture(name), adapted(name)
    import peft  # only now: it needs our shim of torchvision

    assert torch.equal(model(tokens()), base(tokens())), "B starts at 0"
    experts = [key for key, tensor in base.named_parameters() if tensor.dim() == 3]
    assert len(experts) == 2
    theirs: Any = copy.deepcopy(base)
    linear = [key for key, each in base.named_modules() if isinstance(each, nn.Linear) and each is not base.ends[1]]
    config = peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=linear, target_parameters=experts)
    peft.inject_adapter_in_model(config, theirs)
    left_out = theirs.load_state_dict(moved(model).state_dict(), strict=False)
    assert not left_out.unexpected_keys and not any("lora" in key for key in left_out.missing_keys)
    outputs = [each(tokens()) for each in (model, theirs)]
    assert torch.equal(*outputs) and (outputs[0] - base(tokens())).abs().max() > 1e-2
    for each in outputs:
        each.logsumexp(dim=-1).mean().backward()
    gradients = dict(theirs.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key].grad, rtol=1e-5, atol=1e-8)
        assert "experts" not in key or (parameter.grad is not None and parameter.grad.any())


@pytest.mark.parametrize("name", MIXTURES)
def test_only_adapters_are_the_state_also_after_a_step_and_in_a_copy(name: str) -> None:
    model = copy.deepcopy(moved(adapted(name)))
    model(tokens()).sum().backward()
    keys = list(model.state_dict())
    assert keys == [key for key, _ in model.named_parameters()] and all(".lora_" in key for key in keys)
    experts = [tensor for key, tensor in model.state_dict().items() if ".experts." in key]
    sides = sum(sum(each.shape[1:]) for each in mixture(name).parameters() if each.dim() == 3)
    assert sum(each.numel() for each in experts) == RANK * EXPERTS * sides


@pytest.mark.parametrize("name", MIXTURES)
def test_merged_experts_give_the_adapted_ones(name: str) -> None:
    base, model = mixture(name), moved(adapted(name)).eval()
    expected = model(tokens()).detach()
    merged = plain_model(copy.copy(model))
    torch.testing.assert_close(merged(tokens()), expected, rtol=1e-5, atol=1e-5)
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert (base(tokens()) - expected).abs().max() > 1e-2


def test_experts_are_targets_by_the_ends_of_their_names() -> None:
    keys = [
        key.partition(".lora_")[0] for key in adapted("Mixtral", targets=["experts.down_proj", "q_proj"]).state_dict()
    ]
    assert {key.rpartition("layers.0.")[2] for key in keys} == {"mlp.experts", "self_attn.q_proj"}


def test_what_all_linear_does_not_cover_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn.cache_clear()
    with caplog.at_level(logging.WARNING, "fedsign"):
        for _ in range(2):
            adapted("Mixtral")
        adapted("Mixtral", dropout=0.1)
        adapted("Mixtral", targets="q_proj")
    first, second = (record.getMessage() for record in caplog.records)
    assert "leaves network.model.layers.0.mlp.gate.weight and others" in first and "experts." not in first
    assert "mlp.experts.gate_up_proj, network.model.layers.0.mlp.experts.down_proj" in second


def test_experts_that_are_asked_for_with_dropout_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'network.*experts.gate_up_proj' holds experts, to which dropout does not"):
        adapted("Mixtral", targets="gate_up_proj", dropout=0.1)


def test_experts_are_averaged_with_one_rank() -> None:
    for changes in ({"aggregation": "flora"}, {"ranks": (1, 2)}):
        with pytest.raises(ConfigError, match="holds experts, whose adapters are averaged with one rank"):
            adapted("Mixtral", **changes)
    transforms = transforms_of(adapted("Mixtral"))
    assert [each.adapters for each in transforms if isinstance(each, Adapters)] == [()]  # no error is measured
