"""The list of blocks is found in every model that LISA supports; if it is ambiguous, an error says what to set."""

import importlib.util
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from fedsign import plugins
from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.optim.blocks import find_blocks
from fedsign.optim.lisa import LISA
from fedsign.torchvision_shim import torchvision


def of_torchvision(name: str, **settings: object) -> nn.Module:
    return getattr(torchvision("torchvision.models"), name)(weights=None, **settings)


def vit() -> nn.Module:
    return torchvision("torchvision.models").VisionTransformer(
        image_size=8, patch_size=4, num_layers=3, num_heads=2, hidden_dim=8, mlp_dim=16
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: of_torchvision("resnet18"), [f"layer{stage}" for stage in (1, 2, 3, 4)]),
        (vit, [f"encoder.layers.encoder_layer_{layer}" for layer in range(3)]),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 4, enable_nested_tensor=False),
            [f"layers.{layer}" for layer in range(4)],
        ),
    ],
    ids=["torchvision-resnet", "torchvision-vit", "torch-encoder"],
)
def test_the_blocks_of_vision_models_are_found(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert list(find_blocks(make())) == expected


@pytest.mark.parametrize(
    ("name", "settings", "input_shape", "expected"),
    [
        ("resnet20", {}, (3, 8, 8), [str(place) for place in range(3, 12)]),
        ("resnet18", {}, (3, 32, 32), [f"layer{stage}" for stage in (1, 2, 3, 4)]),
        ("resnet18", {}, (64,), [f"1.layer{stage}" for stage in (1, 2, 3, 4)]),
        ("gpt", {"width": 8, "depth": 3, "num_heads": 2}, (4,), [f"blocks.{layer}" for layer in range(3)]),
    ],
    ids=["resnet20", "resnet18", "resnet18-of-rows", "gpt"],
)
def test_the_blocks_of_registered_models_are_found(
    name: str, settings: dict[str, int], input_shape: tuple[int, ...], expected: list[str]
) -> None:
    assert list(find_blocks(plugins.build("model", name, settings, input_shape, 11))) == expected


def of_hugging_face() -> ModuleType:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return llm.transformers("a test")


HUGGING_FACE = {
    "GPT2": ({"n_embd": 8, "n_layer": 3, "n_head": 2, "vocab_size": 17}, "transformer.h"),
    "Llama": ({"num_key_value_heads": 2}, "model.layers"),
    "Mistral": ({"num_key_value_heads": 2}, "model.layers"),
    "Mixtral": ({"num_key_value_heads": 2, "num_local_experts": 2}, "model.layers"),
    "GPTNeoX": ({}, "gpt_neox.layers"),
    "OPT": ({"ffn_dim": 16, "word_embed_proj_dim": 8}, "model.decoder.layers"),
}
SMALL = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 17,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_the_blocks_of_hugging_faces_causal_language_models_are_found(family: str) -> None:
    transformers = of_hugging_face()
    settings, path = HUGGING_FACE[family]
    config = getattr(transformers, f"{family}Config")(**(settings if family == "GPT2" else SMALL | settings))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert list(find_blocks(model)) == [f"{path}.{layer}" for layer in range(3)]


def test_the_blocks_of_hugging_faces_vision_transformers_are_found_and_trained() -> None:
    transformers = of_hugging_face()
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    model = transformers.ViTForImageClassification(config)
    blocks = list(find_blocks(model))
    assert len(blocks) == 3
    optimizer = LISA(model, draw=lambda index: [1])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(2, 3, 8, 8)).logits.square().sum().backward()
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert {name for name in moved if name.startswith(blocks[1])}
    assert not {name for name in moved if name.startswith((blocks[0], blocks[2]))}


def test_a_tied_language_model_of_hugging_face_trains_its_blocks_by_turns() -> None:
    """GPT-2's head is its embedding: one parameter with two names, which always trains."""
    transformers = of_hugging_face()
    config = transformers.GPT2Config(n_embd=8, n_layer=3, n_head=2, vocab_size=17)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = LISA(model, num_sampled_layers=1, period=1, draw=lambda index: [index % 3])
    tokens = torch.arange(8)[None]
    for layer in range(3):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert {name.split(".")[2] for name in trains if name.startswith("transformer.h.")} == {str(layer)}
    assert {"lm_head.weight", "transformer.wte.weight", "transformer.ln_f.weight"} <= optimizer.trained


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.ModuleList([layer(), layer()]), nn.ModuleList([layer(), layer(), layer()])


def test_a_path_names_one_list_of_any_modules_or_several_modules() -> None:
    model = TwoTowers()
    assert list(find_blocks(model, "text")) == ["text.0", "text.1"]
    assert list(find_blocks(model, "text.*,image.*")) == [
        *(f"text.{at}" for at in range(2)),
        *(f"image.{at}" for at in range(3)),
    ]
    assert list(find_blocks(model, "image.2, text.0")) == ["text.0", "image.2"]  # in the model's order
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert list(find_blocks(mlp, "1,3")) == ["1", "3"]


def test_a_small_list_beside_the_large_one_is_not_it() -> None:
    model = nn.Module()
    model.main = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.ReLU()) for _ in range(3))
    model.adapters = nn.ModuleList(layer() for _ in range(3))
    assert list(find_blocks(model)) == ["main.0", "main.1", "main.2"]


@pytest.mark.parametrize(
    ("model", "path", "sentence"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "", "no list of blocks was found in a Sequential"),
        (TwoTowers(), "", r"several lists .*: text \(2 blocks\), image \(3 blocks\); set blocks"),
        (TwoTowers(), "texts", "has no modules with parameters at 'texts'"),
        (TwoTowers(), "text.0,image.7", "has no modules with parameters at 'image.7'"),
        (TwoTowers(), "text.0.1", "has no modules with parameters at 'text.0.1'"),
        (TwoTowers(), "text.0,text.0.1", "has no modules with parameters at 'text.0.1'"),
        (TwoTowers(), "text.0,text.0.0", "'text.0.0' is a part of 'text.0'"),
    ],
)
def test_what_is_not_clear_is_said_in_a_sentence(model: nn.Module, path: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find_blocks(model, path)
