"""A small pretrained language model in a folder: a LLaMA architecture trained on Python's help texts.

Built on the spot, so that recipes need no download. The tokenizer is a byte-level BPE of 1,024 tokens, trained on the
same texts.  The model is our `gpt`, trained by one client in one round and written by `fedsign export`: config.json,
model.safetensors, tokenizer files.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsign.config import merged
from fedsign.data.text import libraries as llm
from simulations.api import run
from simulations.language.export import export
from simulations.recipes.cells import ONE_READER

SHAPE: dict[str, Any] = {
    "name": "gpt",
    "depth": 3,
    "width": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "activation": "swiglu",
    "norm": "rms_norm",
    "positions": "rotary",
    "tied": True,
    "bias": False,
}
BLOCK_LENGTH, _VOCABULARY, _END = 128, 1024, "<|end|>"


def write(folder: Path, *, steps: int) -> None:
    """Train the model for `steps` steps of 8 blocks, and write it into a new folder.

    Raises:
        ConfigError: the extra `llm` is not installed, or the folder exists already.
    """
    from pydoc_data.topics import topics  # the texts behind `help()`

    with tempfile.TemporaryDirectory() as scratch:
        texts, tokenizer = Path(scratch) / "texts", Path(scratch) / "tokenizer"
        texts.mkdir()
        for name, text in topics.items():
            (texts / f"{name}.txt").write_text(text, encoding="utf-8")
        write_tokenizer(texts, tokenizer)
        data = {"name": "text_folder", "root": str(texts), "tokenizer": str(tokenizer), "block_length": BLOCK_LENGTH}
        pretraining = {"data": data, "model": SHAPE, "results": {"root": str(Path(scratch) / "runs")}}
        done = run(merged(experiment(steps=steps, lr=3e-3, optimizer={"name": "adamw"}), pretraining))
        export(done.path, folder)


def experiment(*, steps: int, lr: float, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the experiment: one round of one client, batches of 8 blocks, warm-up and cosine decay."""
    return {
        **ONE_READER,
        "client": {
            "local_steps": steps,
            "batch_size": 8,
            "lr": lr,
            "clip_norm": 1.0,
            "optimizer": dict(optimizer),
            "schedule": {"name": "warmup_cosine", "per": "step"},
        },
    }


def write_tokenizer(texts: Path, folder: Path) -> None:
    """Train a byte-level BPE on the files of a folder, and write it in the format of `transformers`."""
    library = llm.transformers("this recipe")
    from tokenizers import ByteLevelBPETokenizer, Tokenizer  # installed with transformers

    trained = ByteLevelBPETokenizer()
    files = [str(path) for path in sorted(texts.iterdir())]
    # sorted: the order of a folder's entries differs between file systems
    trained.train(files, vocab_size=_VOCABULARY, min_frequency=0, show_progress=False, special_tokens=[_END])
    tokenizer = Tokenizer.from_str(trained.to_str())
    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token"), _END)
    library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(str(folder))
