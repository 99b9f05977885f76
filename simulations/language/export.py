"""Export a run's language model as a folder for `transformers`: config.json, *.safetensors, tokenizer files.

Adapters are merged into their base matrices; multipliers of a parameterization are folded into the weights.
"""

import shutil
from pathlib import Path
from typing import Any

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.models.hugging_face import network_of
from fedsign.models.transform import plain_model
from fedsign.workload import Workload
from simulations.api import load_run

_OF_TOKENIZERS = ("tokenizer*", "*tokens*.json", "chat_template.jinja", "vocab.*", "merges.txt")


def export(run: Path, out: Path) -> dict[str, Any]:
    """Write the evaluated model of a run's newest checkpoint into a new folder; return facts about it.

    Raises:
        ResultsError: there is no such run, or it has no checkpoint yet.
        ConfigError: the folder exists already, or `transformers` has no such architecture.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} is there already; name a folder that is not, or an empty one.")
    loaded = load_run(run)
    # before the folder is made: a run of images is refused here
    end_id = _end_id(loaded.config)
    network = network_of(plain_model(loaded.model().cpu()), end_id=end_id)
    out.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(out)
    copied = _copy_tokenizer(loaded.config, out)
    return {
        "folder": str(out),
        "architecture": type(network).__name__,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "tokenizer": copied or f"none: data.name={loaded.config.data.name} has no tokenizer in files",
    }


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
