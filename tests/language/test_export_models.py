"""Exported models of a run, loaded by `transformers`: the same logits after a round trip to disk."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedsign.config import from_dict
from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.models.hugging_face import network_of
from simulations.api import Run, run
from simulations.language.export import export
from tests.language.language_samples import save_tokenizer
from tests.language.test_causal_lm import COMMON, TIED, saved, transformers
from tests.language.test_causal_lm import build as of_folder
from tests.language.test_gpt import LLAMA, build, tokens
from tests.language.test_gpt_peers import randomized

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

NF4 = {"quant_type": "nf4", "compress_statistics": True}
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "LLaMA": (LLAMA, "LlamaForCausalLM"),
    "grouped, tied": ({**LLAMA, "num_kv_heads": 2, "tied": True, "rotary_base": 500.0}, "LlamaForCausalLM"),
    "LLaMA with biases": ({**LLAMA, "bias": True, "ffn_width": 40, "norm_eps": 1e-3}, "LlamaForCausalLM"),
    "GPT-2": ({}, "GPT2LMHeadModel"),
    "GPT-2, untied, narrow": (
        {"tied": False, "ffn_width": 48, "norm_eps": 1e-3, "num_positions": 20},
        "GPT2LMHeadModel",
    ),
    "GPT-2 without biases": ({"bias": False, "dropout": 0.1}, "GPT2LMHeadModel"),
}


def loaded(folder: Path) -> Any:
    library = llm.transformers("this test")
    model, found = library.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    return model.eval()


def assert_same_logits(ours: nn.Module, theirs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens()).logits, ours.eval()(tokens()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_a_decoder_of_ours_is_written_as_one_of_transformers_with_the_same_logits(name: str, tmp_path: Path) -> None:
    settings, architecture = SHAPES[name]
    ours = randomized(build(**settings), 3)
    network = network_of(ours, end_id=4)
    network.save_pretrained(tmp_path)
    found = loaded(tmp_path)
    assert type(found).__name__ == architecture and found.config.eos_token_id == 4
    assert_same_logits(ours, found)
    assert ours(tokens()).abs().max() > 1
    again = of_folder(path=str(tmp_path))  # and back
    assert_same_logits(ours, lambda given: type("Out", (), {"logits": again.eval()(given)}))


@pytest.mark.parametrize("name", ["LLaMA", *sorted(TIED), "GPT-NeoX"])
def test_a_model_of_transformers_is_written_as_it_came(name: str, tmp_path: Path) -> None:
    ours = randomized(of_folder(path=str(saved(tmp_path / "given", name))), 3)
    network_of(ours, end_id=0).save_pretrained(tmp_path / "written")
    assert_same_logits(ours, loaded(tmp_path / "written"))


def test_a_decoder_that_transformers_does_not_know_is_a_sentence() -> None:
    for settings in ({"positions": "rotary"}, {"num_kv_heads": 2}, {**LLAMA, "activation": "gelu"}):
        with pytest.raises(ConfigError, match=r"knows no decoder with model\.positions=.*; expected rotary, rms_norm"):
            network_of(build(**settings), end_id=0)
    with pytest.raises(ConfigError, match=r"was asked of a Linear; expected a language model"):
        network_of(nn.Linear(2, 2), end_id=0)


def experiment(tmp_path: Path, **changes: Any) -> Run:
    settings: dict[str, Any] = {
        "rounds": 1,
        "callbacks": [],
        "task": "language",
        "metrics": ["perplexity"],
        "data": {"name": "pytext", "block_length": 16, "test_fraction": 0.01},
        "model": {"name": "gpt", "depth": 1, "width": 16, "num_heads": 2, **LLAMA},
        "partition": {"name": "iid", "num_clients": 2},
        "server": {"cohort_size": 2},
        "strategy": {"name": "fedavg"},
        "client": {"local_steps": 3, "batch_size": 4, "lr": 0.01, "optimizer": {"name": "adamw"}},
        "results": {"root": str(tmp_path / "runs")},
    }
    return run(from_dict(settings | changes))


@pytest.mark.parametrize("optimizer", ["adamw", "lora"])
def test_a_run_is_written_with_its_adapters_merged(optimizer: str, tmp_path: Path) -> None:
    client = {"local_steps": 3, "batch_size": 4, "lr": 0.05, "optimizer": {"name": optimizer}}
    done = experiment(tmp_path, client=client)
    facts = export(done.path, tmp_path / "out")
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["tokenizer"] == "none: data.name=pytext has no tokenizer in files"
    found, ours = loaded(tmp_path / "out"), done.model()
    with torch.no_grad():
        given = torch.arange(16)[None]
        torch.testing.assert_close(found(given).logits, ours(given), rtol=1e-4, atol=1e-5)
    assert facts["parameters"] == sum(parameter.numel() for parameter in found.parameters())


def test_the_tokenizers_files_come_along(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", vocabulary=400)
    save_tokenizer(folder)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("A text that is long enough. " * 20)
    data = {"name": "text_folder", "root": str(texts), "tokenizer": str(folder), "block_length": 8}
    done = experiment(tmp_path, data=data, model={"name": "transformers", "path": str(folder)})
    facts = export(done.path, tmp_path / "out")
    assert set(facts["tokenizer"]) >= {"tokenizer.json", "tokenizer_config.json"}
    for name in facts["tokenizer"]:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    loaded(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "source"), [("GPT-2", "path"), ("Mixtral", "path"), ("tied LLaMA", "start"), ("LLaMA", "flora")]
)
def test_masters_start_from_the_float32_weights_of_the_files(name: str, source: str, tmp_path: Path) -> None:
    """The mean of equal models is exact, so that a round of tiny steps shows where it began."""
    model = {"name": "transformers", "path": str(saved_base(tmp_path, name)), "dtype": "bf16"}
    exact = of_folder(path=model["path"], vocabulary=257).state_dict()
    if source == "start":
        exact = {key: tensor * 1.001 for key, tensor in exact.items()}  # some are the same in bf16
        save_file(exact, tmp_path / "start.safetensors")
        model["start"] = str(tmp_path / "start.safetensors")
    optimizer = {"name": "lora", "aggregation": "flora"} if source == "flora" else {"name": "sgd"}
    for low_precision, nearest, furthest in (("master", 0.0, 1e-9), ("stochastic", 1e-4, 1e-2)):
        client = {"local_steps": 1, "lr": 1e-12, "optimizer": optimizer, "low_precision": low_precision}
        done = experiment(tmp_path, model=model, data=BYTES, client=client)
        end = {
            key.replace(".base_layer", ""): tensor for key, tensor in load_file(done.path / "model.safetensors").items()
        }
        distance = max((end[key].float() - exact[key]).abs().max().item() for key in exact.keys() & end.keys())
        assert nearest <= distance < furthest, low_precision


def test_a_tokenizer_that_the_run_did_not_use_stays_where_it_is(tmp_path: Path) -> None:
    """The model's own, beside its first weights: after training on characters its numbers would be other tokens."""
    folder = saved(tmp_path / "model", vocabulary=200)
    (folder / "tokenizer.json").write_text("{}")
    done = experiment(tmp_path, model={"name": "transformers", "path": str(folder)})
    facts = export(done.path, tmp_path / "out")
    assert facts["tokenizer"] == "none: data.name=pytext has no tokenizer in files"
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_what_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    done = experiment(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*full is there already; name a folder that is not, or an empty one"):
        export(done.path, tmp_path / "full")
    other = run(from_dict({"rounds": 1, "callbacks": [], "results": {"root": str(tmp_path / "digits")}}))
    with pytest.raises(ConfigError, match=r"data\.name=digits is no text, but an export for `transformers`"):
        export(other.path, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of transformers to peft
@pytest.mark.parametrize(
    ("name", "aggregation"), [("LLaMA", "ffa"), *((name, "average") for name in ("LLaMA", "GPT-2", "Mixtral"))]
)
def test_adapters_alone_are_loaded_by_peft(name: str, aggregation: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    done = adapted(tmp_path, name, aggregation=aggregation, rank=3, alpha=5.0)
    facts = export(done.path, tmp_path / "out", adapters=True)
    base = loaded(tmp_path / "base")
    before = base(tokens()).logits
    found, ours = peft.PeftModel.from_pretrained(base, tmp_path / "out"), done.model()
    with torch.no_grad():
        torch.testing.assert_close(found(tokens()).logits, ours(tokens()), rtol=1e-4, atol=1e-5)
        assert (ours(tokens()) - before).abs().max() > 1e-2
    assert facts["parameters"] == sum(tensor.numel() for key, tensor in found.named_parameters() if ".lora_" in key)
    assert facts["base"] == str(tmp_path / "base") == found.peft_config["default"].base_model_name_or_path


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_adapters_of_qlora_are_those_of_a_base_in_4_bits_and_the_export_says_so(tmp_path: Path) -> None:
    peft, library = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes").functional
    done = adapted(tmp_path, "LLaMA", quantization="nf4")
    facts = export(done.path, tmp_path / "out", adapters=True)
    assert "load_in_4bit=True" in facts["load_base_with"] and "double_quant=True" in facts["load_base_with"]
    found = peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "out")
    with torch.no_grad():
        ours, unlike = done.model()(tokens()), found(tokens()).logits
        for name, layer in found.named_modules():
            if name.endswith("base_layer"):
                layer.weight.copy_(library.dequantize_4bit(*library.quantize_4bit(layer.weight, **NF4)))
        torch.testing.assert_close(found(tokens()).logits, ours, rtol=1e-4, atol=1e-5)
        assert (unlike - ours).abs().max() > 1e-2


BYTES = {"name": "pytext", "block_length": 16, "test_fraction": 0.01, "tokenizer": "byte"}


def saved_base(tmp_path: Path, architecture: str) -> Path:
    folder = tmp_path / "base"
    if architecture == "Mixtral":
        config = transformers.MixtralConfig(**COMMON, intermediate_size=24, num_key_value_heads=2, num_local_experts=3)
        config.vocab_size = 257
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder
    return saved(folder, architecture, vocabulary=257)


def adapted(tmp_path: Path, architecture: str, **optimizer: Any) -> Run:
    model = {"name": "transformers", "path": str(saved_base(tmp_path, architecture))}
    client = {"local_steps": 3, "batch_size": 4, "lr": 0.05, "optimizer": {"name": "lora"} | optimizer}
    return experiment(tmp_path, model=model, data=BYTES, client=client)


@pytest.mark.parametrize("changing", [{"head": True}, {"aggregation": "fedex"}])
def test_adapters_alone_are_refused_where_they_are_not_all_that_was_trained(
    changing: dict[str, Any], tmp_path: Path
) -> None:
    done = adapted(tmp_path, "LLaMA", **changing)
    with pytest.raises(ConfigError, match=r"has changed '.*' of the base, too .*without --adapters"):
        export(done.path, tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()


def test_adapters_alone_need_a_run_with_adapters_on_a_base_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"base is no pretrained model in a folder .*without --adapters"):
        export(experiment(tmp_path).path, tmp_path / "out", adapters=True)
    plain = adapted(tmp_path, "LLaMA", name="adamw")
    with pytest.raises(ConfigError, match=r"but the run has none; expected one with client\.optimizer\.name=lora"):
        export(plain.path, tmp_path / "out", adapters=True)
