"""Export a run's language model as a folder for `transformers`: config.json, *.safetensors, tokenizer files.

Adapters are merged into their base matrices, or written alone, for `peft`.  Multipliers of a parameterization are
folded into the weights.
"""

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError, ResultsError
from fedsign.models.causal_lm import CausalLM
from fedsign.models.hugging_face import network_of
from fedsign.models.transform import plain_model, transforms_of
from fedsign.storage.owned import check_writable, writing
from fedsign.workload import Workload
from simulations.api import load_run

_IN_4_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
_OF_TOKENIZERS = ("tokenizer*", "*tokens*.json", "chat_template.jinja", "vocab.*", "merges.txt")


def export(run: Path, out: Path, *, adapters: bool = False) -> dict[str, Any]:
    """Write the evaluated model of a run's newest checkpoint in place of an earlier export; return facts about it.

    Args:
        adapters: write only LoRA's adapters, as `peft` does.

    Raises:
        ResultsError: there is no such run, or it has no checkpoint yet.
        ConfigError: the folder holds other files, `transformers` has no such architecture, or the run has no adapters
            that are all of its training.
    """
    try:
        check_writable(out, "*")  # all of it: `transformers` reads whatever lies in the folder
    except ResultsError as error:
        raise ConfigError(
            f"--out {out} is there already; name a folder that is not, or an empty one: {error}"
        ) from error
    loaded = load_run(run)
    # before the folder is made: a run of images is refused here
    end_id = _end_id(loaded.config)
    model = loaded.model().cpu()
    with writing(out, "model") as staged:
        facts = _save_adapters(model, loaded.config, staged) if adapters else _save_merged(model, end_id, staged)
        copied = _copy_tokenizer(loaded.config, staged)
    return {
        "folder": str(out),
        **facts,
        "tokenizer": copied or f"none: data.name={loaded.config.data.name} has no tokenizer in files",
    }


def _save_merged(model: nn.Module, end_id: int, out: Path) -> dict[str, Any]:
    network = network_of(plain_model(model), end_id=end_id)
    network.save_pretrained(out)
    num = sum(parameter.numel() for parameter in network.parameters())
    return {"architecture": type(network).__name__, "parameters": num}


def _save_adapters(model: nn.Module, config: ExperimentConfig, out: Path) -> dict[str, Any]:
    path = model.path if isinstance(model, CausalLM) else ""
    if not isinstance(model, CausalLM) or not path:
        raise ConfigError(
            "--adapters was given, but the run's base is no pretrained model in a folder (model.name=transformers, "
            "model.path), beside which `peft` could load them; export the merged model, without --adapters."
        )
    base = str(Path(path).expanduser().absolute())
    num = sum(transform.save_adapters(model.network, base, out) for transform in transforms_of(model))
    if not num:
        raise ConfigError(
            "--adapters was given, but the run has none; expected one with client.optimizer.name=lora. Export its "
            "model without --adapters."
        )
    # beside a base that is not quantized, they are another model than was trained
    in_4_bits = {"load_base_with": _IN_4_BITS} if config.client.optimizer.settings.get("quantization") == "nf4" else {}
    return {"architecture": type(model.network).__name__, "base": base, **in_4_bits, "parameters": num}


def _end_id(config: ExperimentConfig) -> int:
    text = Workload(config).dataset.text
    if text is None:
        raise ConfigError(
            f"data.name={config.data.name} is no text, but an export for `transformers` is of language models; give "
            "a run of one."
        )
    return text.end_id


def _copy_tokenizer(config: ExperimentConfig, out: Path) -> list[str]:
    """Copy the run's tokenizer files; return their names.

    They come from the run's data settings. The tokenizer beside the initial model may be another one, with other token
    ids.
    """
    given = config.data.settings.get("tokenizer")
    if not given:
        return []
    folder = Path(given).expanduser()
    files = [file for pattern in _OF_TOKENIZERS for file in sorted(folder.glob(pattern)) if file.is_file()]
    for file in files:
        shutil.copy2(file, out / file.name)
    return [file.name for file in files]
