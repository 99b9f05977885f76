"""Language models by name or by a Hugging Face `config.json`, for `fedsign estimate memory --model`.

Memory depends on shapes alone, so nothing is downloaded.  A file's model is the network of `transformers` that
`model.name=transformers` trains, built on the meta device.  Without that library, and for the models known by name,
the families llama, mistral, and gpt2 map to settings of `fedsign.models.gpt`, which saves other activations.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from fedsign.data.text.libraries import transformers
from fedsign.errors import ConfigError
from fedsign.models.causal_lm import CausalLM
from fedsign.models.gpt import gpt
from fedsign.registry import one_of


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedModel:
    """A model to estimate; `make(tokens, checkpoint_activations)` builds it on the current default device."""

    title: str
    vocabulary: int
    make: Callable[[int, bool], nn.Module]
    longest: int | None = None  # maximum number of tokens in a row, if limited


def _llama(depth: int, width: int, num_heads: int, num_kv_heads: int, ffn_width: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": depth,
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": ffn_width,
        "vocab_size": 32_000,
    }


_GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50_257}

NAMED: dict[str, tuple[str, dict[str, Any]]] = {  # title and config.json; arguments as in `_llama`
    "llama-2-7b": ("LLaMA-2-7B", _llama(32, 4096, 32, 32, 11_008)),
    "llama-2-70b": ("LLaMA-2-70B", _llama(80, 8192, 64, 8, 28_672)),
    "mistral-7b": ("Mistral-7B", _llama(32, 4096, 32, 8, 14_336)),
    "tinyllama": ("TinyLlama", _llama(22, 2048, 32, 4, 5632)),
    "gpt2-small": ("GPT-2 small", _GPT2),
}


def named_model(name: str) -> NamedModel:
    """Look up a model by name, or by the path of a `config.json`.

    Raises:
        ConfigError: the name is unknown, or the file describes no model that can be built.
    """
    if name.lower() in NAMED:
        return _of_config(*NAMED[name.lower()], name=name)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    # a path that was mistyped gets an error about the file, not the list of names
    if path.suffix == ".json" or path.exists():
        return _of_file(path)
    raise ConfigError(
        f"--model {name} was given.{one_of(name.lower(), NAMED)}, a config.json of Hugging "
        "Face's, or a folder with one."
    )


def _of_file(path: Path) -> NamedModel:
    try:
        raw_config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--model {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"--model {path} is no JSON ({error}); expected a config.json of Hugging Face's.") from error
    family = raw_config.get("model_type") if isinstance(raw_config, dict) else None
    if not isinstance(family, str):
        raise ConfigError(
            f"--model {path} has no 'model_type'; expected a config.json of Hugging Face's, which names the family."
        )
    title = path.parent.resolve().name if path.name == "config.json" else path.stem
    if find_spec("transformers") is not None:
        return _of_transformers(title, raw_config, str(path))
    return _of_config(title, raw_config, name=str(path))


def _of_config(title: str, raw_config: dict[str, Any], *, name: str) -> NamedModel:
    """Use our `gpt` if it covers the configuration, else `transformers`."""
    family = raw_config["model_type"]
    try:
        if family in ("llama", "mistral") and _is_plain_llama(raw_config):
            settings = _of_llama(raw_config)
        elif family == "gpt2":
            settings = _of_gpt2(raw_config)
        else:
            return _of_transformers(title, raw_config, name)
        vocabulary = int(raw_config["vocab_size"])
    except KeyError as error:
        raise ConfigError(
            f"--model {name} is of the family {family}, but has no {error}; expected a whole config.json."
        ) from error
    return NamedModel(
        title=title,
        vocabulary=vocabulary,
        make=lambda tokens, checkpoint: gpt((tokens,), vocabulary, checkpoint_activations=checkpoint, **settings),
        longest=settings.get("num_positions"),
    )


def _is_plain_llama(raw_config: Mapping[str, Any]) -> bool:
    """Whether our gpt covers it: no biases, and heads that divide the width."""
    head_width = raw_config.get("head_dim") or raw_config["hidden_size"] // raw_config["num_attention_heads"]
    has_bias = raw_config.get("attention_bias") or raw_config.get("mlp_bias")
    return not has_bias and head_width * raw_config["num_attention_heads"] == raw_config["hidden_size"]


def _of_llama(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "activation": "swiglu",
        "norm": "rms_norm",
        "positions": "rotary",
        "bias": False,
        "depth": raw_config["num_hidden_layers"],
        "width": raw_config["hidden_size"],
        "num_heads": raw_config["num_attention_heads"],
        "num_kv_heads": raw_config.get("num_key_value_heads") or raw_config["num_attention_heads"],
        "ffn_width": raw_config["intermediate_size"],
        "tied": bool(raw_config.get("tie_word_embeddings", False)),
    }


def _of_gpt2(raw_config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "depth": raw_config["n_layer"],
        "width": raw_config["n_embd"],
        "num_heads": raw_config["n_head"],
        "ffn_width": raw_config.get("n_inner") or 4 * raw_config["n_embd"],
        "positions": "learned",
        "num_positions": raw_config["n_positions"],
    }


def _of_transformers(title: str, raw_config: dict[str, Any], name: str) -> NamedModel:
    """A model of any other family that `transformers` knows."""
    library: Any = transformers(f"--model {name} of the family {raw_config['model_type']}")
    try:
        config = library.AutoConfig.for_model(**raw_config)
        # a KeyError for a family without a causal model, before anything is built
        library.AutoModelForCausalLM._model_mapping[type(config)]
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"--model {name} is of the family {raw_config['model_type']}, of which transformers {library.__version__} "
            "knows no causal language model; expected one such as llama, mistral, gpt2 or qwen2."
        ) from error

    def make(tokens: int, checkpoint: bool) -> nn.Module:
        # sdpa, because `fedsign.memory.step.Kernels` recognizes torch's function only
        model = library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if checkpoint:
            model.gradient_checkpointing_enable()
        return CausalLM(model)

    return NamedModel(title=title, vocabulary=int(config.vocab_size), make=make)
