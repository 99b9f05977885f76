"""Language models by name, or by a `config.json` of Hugging Face's, as shapes of our `gpt`: nothing is downloaded.

What memory depends on is the shapes alone, so the families llama, mistral and gpt2 are said in the settings of `fedsign.models.gpt`.
Any other `config.json` is made by `transformers`, on the meta device (`--model` of `fedsign estimate memory`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fedsign.data.text.libraries import transformers
from fedsign.errors import ConfigError
from fedsign.models.causal_lm import CausalLM
from fedsign.models.gpt import gpt
from fedsign.registry import nearest

_LLAMA: dict[str, Any] = {
    "activation": "swiglu",
    "norm": "rms_norm",
    "positions": "rotary",
    "tied": False,
    "bias": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model that can be made anew, on the device of the moment: for rows of so many tokens, with activations checkpointed or not."""

    title: str
    vocabulary: int
    make: Callable[[int, bool], nn.Module]
    longest: int | None = None  # tokens in a row, where there is an end


def _llama(
    title: str, *, depth: int, width: int, num_heads: int, num_kv_heads: int, ffn_width: int, vocabulary: int = 32_000
) -> Subject:
    settings = _LLAMA | {
        "depth": depth,
        "width": width,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "ffn_width": ffn_width,
    }
    return of_settings(title, settings, vocabulary=vocabulary)


def of_settings(title: str, settings: Mapping[str, Any], *, vocabulary: int) -> Subject:
    """A network of our `gpt` family."""
    longest = settings.get("num_positions") if settings["positions"] == "learned" else None
    return Subject(
        title=title,
        vocabulary=vocabulary,
        make=lambda tokens, checkpoint: gpt((tokens,), vocabulary, checkpoint_activations=checkpoint, **settings),
        longest=longest,
    )


NAMED: dict[str, Callable[[], Subject]] = {
    "llama-2-7b": lambda: _llama("LLaMA-2-7B", depth=32, width=4096, num_heads=32, num_kv_heads=32, ffn_width=11_008),
    "llama-2-70b": lambda: _llama("LLaMA-2-70B", depth=80, width=8192, num_heads=64, num_kv_heads=8, ffn_width=28_672),
    "mistral-7b": lambda: _llama("Mistral-7B", depth=32, width=4096, num_heads=32, num_kv_heads=8, ffn_width=14_336),
    "tinyllama": lambda: _llama("TinyLlama", depth=22, width=2048, num_heads=32, num_kv_heads=4, ffn_width=5632),
    "gpt2-small": lambda: of_settings(
        "GPT-2 small",
        {"depth": 12, "width": 768, "num_heads": 12, "positions": "learned", "num_positions": 1024},
        vocabulary=50_257,
    ),
}


def subject_of(name: str) -> Subject:
    """A model by its name, or by the path of a `config.json`.

    Raises:
        ConfigError: there is none of that name, or the file says nothing that can be made.
    """
    if name.lower() in NAMED:
        return NAMED[name.lower()]()
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" or path.exists():
        return _of_file(path)
    raise ConfigError(
        f"--model {name} was given.{nearest(name.lower(), NAMED)} Expected is one of {', '.join(NAMED)}, a config.json of Hugging "
        "Face's, or a folder with one."
    )


def _of_file(path: Path) -> Subject:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--model {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(
            f"--model {path} is no JSON ({error}); expected is a config.json of Hugging Face's."
        ) from error
    family = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(family, str):
        raise ConfigError(
            f"--model {path} has no 'model_type'; expected is a config.json of Hugging Face's, which names the family."
        )
    title = path.parent.resolve().name if path.name == "config.json" else path.stem
    try:
        if family in ("llama", "mistral") and _is_plain_llama(found):
            return of_settings(title, _of_llama(found), vocabulary=int(found["vocab_size"]))
        if family == "gpt2":
            return of_settings(title, _of_gpt2(found), vocabulary=int(found["vocab_size"]))
    except KeyError as error:
        raise ConfigError(
            f"--model {path} is of the family {family}, but has no {error}; expected is a whole config.json."
        ) from error
    return _of_transformers(title, found, path)


def _is_plain_llama(found: Mapping[str, Any]) -> bool:
    """Without biases, and with heads that share the width among them, as our gpt has it."""
    head_width = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    has_bias = found.get("attention_bias") or found.get("mlp_bias")
    return not has_bias and head_width * found["num_attention_heads"] == found["hidden_size"]


def _of_llama(found: Mapping[str, Any]) -> dict[str, Any]:
    return _LLAMA | {
        "depth": found["num_hidden_layers"],
        "width": found["hidden_size"],
        "num_heads": found["num_attention_heads"],
        "num_kv_heads": found.get("num_key_value_heads") or found["num_attention_heads"],
        "ffn_width": found["intermediate_size"],
        "tied": bool(found.get("tie_word_embeddings", False)),
    }


def _of_gpt2(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "depth": found["n_layer"],
        "width": found["n_embd"],
        "num_heads": found["n_head"],
        "ffn_width": found.get("n_inner") or 4 * found["n_embd"],
        "positions": "learned",
        "num_positions": found["n_positions"],
    }


def _of_transformers(title: str, found: dict[str, Any], path: Path) -> Subject:
    """Whatever else `transformers` knows, made without weights."""
    library: Any = transformers(f"--model {path} of the family {found['model_type']}")
    try:
        config = library.AutoConfig.for_model(**found)
        library.AutoModelForCausalLM._model_mapping[type(config)]
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"--model {path} is of the family {found['model_type']}, of which transformers {library.__version__} knows no causal "
            "language model; expected is one such as llama, mistral, gpt2 or qwen2."
        ) from error

    def make(tokens: int, checkpoint: bool) -> nn.Module:
        model = library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if checkpoint:
            model.gradient_checkpointing_enable()
        return CausalLM(model)

    return Subject(title=title, vocabulary=int(config.vocab_size), make=make)
