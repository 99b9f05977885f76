"""Models of `transformers` from a folder or a config: equal logits, one name per tensor, and one-sentence errors."""

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from clients.working_model import WorkingModel
from fedsign import plugins
from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.models.causal_lm import CausalLM
from fedsign.numerics import Numerics
from fedsign.seeding import Purpose, global_stream

pytest.importorskip("transformers")
transformers = llm.transformers("this test")

COMMON = {
    "vocab_size": 17,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, Any] = {
    "LLaMA": transformers.LlamaConfig(**COMMON, intermediate_size=64, num_key_value_heads=2),
    "tied LLaMA": transformers.LlamaConfig(**COMMON, intermediate_size=64, tie_word_embeddings=True),
    "Mistral": transformers.MistralConfig(**COMMON, intermediate_size=64, num_key_value_heads=2, sliding_window=4),
    "Qwen": transformers.Qwen2Config(**COMMON, intermediate_size=64, num_key_value_heads=2),
    "GPT-2": transformers.GPT2Config(
        vocab_size=17, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1
    ),
    "GPT-NeoX": transformers.GPTNeoXConfig(**COMMON, intermediate_size=64),
}  # fmt: skip
TIED = {"tied LLaMA", "GPT-2"}


def network(name: str, seed: int = 0, vocabulary: int = 17) -> nn.Module:
    config = copy.deepcopy(CONFIGS[name])
    config.vocab_size = vocabulary
    with global_stream(seed, Purpose.MODEL):
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made.eval()


def saved(folder: Path, name: str = "LLaMA", seed: int = 0, vocabulary: int = 17) -> Path:
    model: Any = network(name, seed, vocabulary)
    model.save_pretrained(folder)
    return folder


def build(*, length: int = 12, vocabulary: int = 17, seed: int = 0, **settings: Any) -> CausalLM:
    with global_stream(seed, Purpose.MODEL):
        model: CausalLM = plugins.build("model", "transformers", settings, (length,), vocabulary)
    return model


def tokens(length: int = 12) -> Tensor:
    return torch.randint(17, (3, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_gives_the_logits_of_its_model_and_holds_no_tensor_twice(name: str, tmp_path: Path) -> None:
    theirs: Any = network(name)
    model = build(path=str(saved(tmp_path, name))).eval()
    assert torch.equal(model(tokens()), theirs(tokens()).logits)
    assert list(model.state_dict()) == [key for key, _ in model.named_parameters(remove_duplicate=False)]
    num = sum(parameter.numel() for parameter in theirs.parameters())
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == num
    twice = sum(tensor.numel() for tensor in theirs.state_dict().values())
    assert (twice > num) == (name in TIED)  # what it would be otherwise


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_a_random_start_by_the_seed(name: str, tmp_path: Path) -> None:
    CONFIGS[name].save_pretrained(tmp_path)
    outside = torch.get_rng_state()
    one, again, other = (build(config=str(tmp_path / "config.json"), seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), outside)
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)
    assert one.keys() == build(config=str(tmp_path)).state_dict().keys()  # the folder does as well


@pytest.mark.parametrize("name", CONFIGS)
def test_all_parameters_train_tied_ones_by_both_their_uses_and_a_copy_is_a_model_of_its_own(
    name: str, tmp_path: Path
) -> None:
    theirs: Any = network(name)
    model = build(path=str(saved(tmp_path, name))).eval()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        functional.cross_entropy(each(tokens()).flatten(0, 1), tokens().flatten()).backward()
    theirs.zero_grad()
    functional.cross_entropy(theirs(tokens()).logits.flatten(0, 1), tokens().flatten()).backward()
    expected = {f"network.{key}": parameter.grad for key, parameter in theirs.named_parameters()}
    assert expected.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():  # a copy's backward pass has not reached it
        assert torch.equal(parameter.grad, expected[key]), key


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_that_are_computed_again_give_the_same_gradients(name: str, tmp_path: Path) -> None:
    folder, gradients, kept = str(saved(tmp_path, name)), [], []
    for again in (False, True):
        sizes: list[int] = []

        def count(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        model = build(path=folder, checkpoint_activations=again).train()
        with global_stream(3, Purpose.TRAINING), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(tokens()).logsumexp(dim=-1).mean()
        loss.backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
        kept.append(sum(sizes))
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-6, atol=1e-8)
    assert kept[1] < kept[0] / 2


def test_checkpointing_lets_no_gradient_reach_layers_that_do_not_train(tmp_path: Path) -> None:
    model = build(path=str(saved(tmp_path)), checkpoint_activations=True).train()
    model.requires_grad_(False)
    assert not model(tokens()).requires_grad


def test_weights_may_be_held_in_bf16(tmp_path: Path) -> None:
    model = build(path=str(saved(tmp_path)), dtype="bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(tokens()).dtype == torch.bfloat16
    for low_precision, sent in (("master", torch.float32), ("stochastic", torch.bfloat16), ("plain", torch.bfloat16)):
        working = WorkingModel(model, Numerics(device=torch.device("cpu"), low_precision=low_precision))
        assert working.outputs(tokens()).dtype == torch.float32
        assert {tensor.dtype for tensor in working.copies().values()} == {sent}


def test_on_the_meta_device_nothing_is_read_and_nothing_allocated(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    with torch.device("meta"):
        model = build(path=str(folder))
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trainers_working_model_loads_it_and_gives_it_back(name: str, tmp_path: Path) -> None:
    one, other = saved(tmp_path / "one", name), saved(tmp_path / "other", name, seed=1)
    working = WorkingModel(build(path=str(one)), Numerics(device=torch.device("cpu")))
    given = build(path=str(other)).state_dict()
    working.load(given)
    found = working.copies()
    assert list(found) == list(given) and all(torch.equal(found[key], given[key]) for key in given)
    assert working.outputs(tokens()).shape == (3, 12, 17)


def test_what_is_missing_or_does_not_fit_is_a_sentence(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"
    with pytest.raises(ConfigError, match=r"expected one of them: a folder with weights, or a config\.json"):
        build()
    with pytest.raises(ConfigError, match=r"expected one of them"):
        build(path=str(folder), config=str(config))
    with pytest.raises(
        ConfigError, match=r"model\.path='no/such' was given .*, but there is nothing; give a folder here"
    ):
        build(path="no/such")
    with pytest.raises(ConfigError, match=r"which is a file; give the folder"):
        build(path=str(config))
    with pytest.raises(ConfigError, match=r"the folder holds no config\.json"):
        build(path=str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"the tokenizer has 18 tokens, but model\.name=transformers was given a model of 17"
    ):
        build(path=str(folder), vocabulary=18)
    with pytest.raises(ConfigError, match=r"samples of 4096 tokens .* allows max_position_embeddings=2048"):
        build(path=str(folder), length=4096)
    with pytest.raises(ConfigError, match=r"takes rows of tokens, but a sample has the shape \(1, 28, 28\)"):
        plugins.build("model", "transformers", {"path": str(folder)}, (1, 28, 28), 10)
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cannot use '.*model': SafetensorError"):
        build(path=str(folder))
    weights.unlink()
    with pytest.raises(ConfigError, match=r"cannot use '.*model': OSError"):
        build(path=str(folder))
    weights.write_bytes(whole)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(
        ConfigError, match=r"do not fit its config\.json: 'model\.layers\.2\.\S+' is missing or of another"
    ):
        build(path=str(folder))
    config.write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match=r"cannot use '.*model': ValueError: Unrecognized configuration class"):
        build(path=str(folder))
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"cannot use '.*model': \w+: "):
        build(path=str(folder))


def test_where_the_library_is_missing_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # what Python itself takes for "cannot be imported"
    with pytest.raises(
        ConfigError,
        match=(
            r"model\.name=transformers needs the package 'transformers', which is not installed here: "
            r"pip install 'fedsign\[llm\]'"
        ),
    ):
        build(path="any")
