"""The logits of a packed example are those that it has alone; a model for which they are not is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.data.checks import checked_dataset
from fedsign.data.text import libraries as llm
from fedsign.data.text.blocks import Stream
from fedsign.data.text.jsonl import jsonl
from fedsign.data.text.packing import pack
from fedsign.data.text.tokenizers import Bytes
from fedsign.errors import ConfigError, DataError
from fedsign.models.causal_lm import CausalLM
from fedsign.models.gpt import GPT
from fedsign.tasks.base import IGNORED
from fedsign.tasks.documents import packed
from fedsign.tasks.language import Language
from fedsign.workload import Workload
from tests.language.language_samples import sums, write_lines
from tests.language.test_gpt import LLAMA

VOCABULARY = 64
DECODERS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rotary": {**LLAMA, "num_kv_heads": 2},
    "recomputed": {"checkpoint_activations": True},
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
FEW = {**SIZES, "num_key_value_heads": 2}
NETWORKS: dict[str, dict[str, Any]] = {
    "Llama": FEW,
    "Mistral": {**FEW, "sliding_window": 3},
    "Qwen3": {**FEW, "head_dim": 8},
    "GPTNeoX": SIZES,
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Mixtral": {**FEW, "num_local_experts": 4},
}
MIXING: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "OPT": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
}


def drawn(model: nn.Module) -> nn.Module:
    """Weights so large that every token matters to every later one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def network(name: str, settings: dict[str, Any]) -> nn.Module:
    pytest.importorskip("transformers")
    transformers = llm.transformers("this test")
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **settings, **ids)
    return drawn(CausalLM(transformers.AutoModelForCausalLM.from_config(config)))


def decoder(name: str) -> nn.Module:
    return drawn(GPT((16, 2), VOCABULARY, depth=2, width=32, **DECODERS[name]))


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in (5, 7, 1, 3)]


def largest_difference(model: nn.Module) -> float:
    """Between the logits of documents in a block and those that each has alone, as a row of its own."""
    parts = documents()
    with torch.no_grad():
        together = model(packed(parts))
        alone = torch.cat([model(part[None]) for part in parts], dim=1)
    assert alone.abs().max() > 0.5, "not vacuous"
    return (together - alone).abs().max().item()


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_processes_packed_examples_as_if_each_were_alone(name: str) -> None:
    model = decoder(name)
    assert largest_difference(model) < 1e-5
    Language().check_model(model, (16, 2), VOCABULARY, name="gpt", device=torch.device("cpu"))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_of_transformers_processes_packed_examples_as_if_each_were_alone(name: str) -> None:
    model = network(name, NETWORKS[name])
    assert largest_difference(model) < 1e-5
    Language().check_model(model, (16, 2), VOCABULARY, name="transformers", device=torch.device("cpu"))


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_packed_examples_is_refused(name: str) -> None:
    model = network(name, MIXING[name])
    said = r"its logits of an example depend on the one before it in the block .* set data.packing=false"
    with pytest.raises(ConfigError, match=said):
        Language().check_model(model, (16, 2), VOCABULARY, name="transformers", device=torch.device("cpu"))
    Language().check_model(model, (16,), VOCABULARY, name="transformers", device=torch.device("cpu"))


def test_a_model_that_takes_no_positions_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))  # takes tokens [B, T] alone
    with pytest.raises(ConfigError, match=r"tokens of the shape \[1, 2, 2\], .* set data.packing=false"):
        Language().check_model(model, (2, 2), 9, name="mine", device=torch.device("cpu"))


@pytest.mark.parametrize("name", DECODERS)
def test_the_gradient_of_packed_examples_is_that_of_each_alone(name: str) -> None:
    """The loss is a mean over scored tokens, so packed and alone have the same one but for rounding."""
    rng = np.random.default_rng(0)
    streams = [Stream(rng.integers(0, VOCABULARY, n), np.arange(n) > 1, 0) for n in (5, 9, 4, 7)]
    gradients = []
    for packing in (True, False):
        model = decoder(name).double().train()
        samples, _ = pack(streams, 16, pad_id=0, packing=packing, split="training")
        assert samples.shape == ((16, 2) if packing else (16,))
        Language().loss(model(samples.features), samples.targets).backward()
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
        assert len(samples) == (2 if packing else 4)
    # rotations are float32 whatever the model's precision
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)
    assert gradients[0].abs().max() > 1e-2


def test_positions_start_again_with_every_example_and_with_padding() -> None:
    streams = [Stream(np.arange(10 * k, 10 * k + n), np.arange(n) > 0, 0) for k, n in enumerate((4, 3, 6))]
    samples, _ = pack(streams, 8, pad_id=-1, packing=True, split="training")
    assert samples.features.unbind(-1)[0].tolist() == [[0, 1, 2, 10, 11, -1, -1, -1], [20, 21, 22, 23, 24, -1, -1, -1]]
    assert samples.features.unbind(-1)[1].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2]]
    assert samples.targets[0].tolist() == [1, 2, 3, 11, 12, *[IGNORED] * 3]


def test_positions_that_do_not_count_are_refused(tmp_path: Path) -> None:
    data = jsonl(0, path=write_lines(tmp_path / "a.jsonl", sums(20)), prompt="short", block_length=96)
    features = data.train.features.clone()
    features[0, 0, 1] = 1
    wrong = Dataset(
        train=Samples(features=features, targets=data.train.targets), test=data.test, class_names=(), text=Bytes()
    )
    with pytest.raises(DataError, match=r"positions that do not count the tokens of each document; expected 0, 1, 2"):
        checked_dataset(wrong, name="mine")


def test_an_experiment_evaluates_packed_examples_as_unpacked_ones(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", sums(30))
    losses, shapes = [], []
    for packing in (True, False):
        data = {"name": "jsonl", "path": path, "block_length": 128, "prompt": "short", "packing": packing}
        tree = {"task": "language", "metrics": ["perplexity"], "data": data, "partition": {"num_clients": 2}}
        model = {"name": "gpt", "width": 16, "depth": 1, "num_heads": 2, "init_std": 0.5}
        work = Workload(from_dict({**tree, "model": model, "server": {"cohort_size": 2}}))
        losses.append(work.evaluate(work.make_model())["loss"])
        shapes.append(work.dataset.input_shape)
    assert shapes == [(128, 2), (128,)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Rounding(nn.Module):
    """Logits of each token alone, with an error that the shape of the input decides, as kernels of large sums have."""

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs[..., 0]
        return 20 * functional.one_hot(tokens, 8).float() + 1e-3 * tokens.shape[1]


def test_a_model_that_rounds_otherwise_in_another_shape_is_taken() -> None:
    """SmolLM2's logits differ by 3e-5 of the largest one on some processors."""
    Language().check_model(Rounding(), (8, 2), 8, name="mine", device=torch.device("cpu"))
