"""Shared helpers for tests of language data: a tokenizer in the format of Hugging Face, and lines of instructions."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsign.data.text import libraries as llm
from fedsign.tasks.documents import is_row_of_tokens, split

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Bigram(nn.Module):
    """Logits of the next token that depend on the token alone: a table [V, V]."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, *, scale: float = 1.0) -> None:
        super().__init__()
        assert is_row_of_tokens(input_shape)
        table = scale * torch.randn(num_outputs, num_outputs, generator=torch.Generator().manual_seed(3))
        self.table = nn.Parameter(table)
        self.largest = 0  # logits that one pass gave

    def forward(self, rows: Tensor) -> Tensor:
        outputs = functional.embedding(split(rows)[0], self.table)
        self.largest = max(self.largest, outputs.numel())
        return outputs


def save_tokenizer(folder: Path, *, chat_template: str | None = CHATML, end: str | None = "<|im_end|>") -> str:
    """A byte-level tokenizer without merges, in a folder: any text has as many tokens as bytes."""
    pytest.importorskip("transformers")
    transformers = llm.transformers("this test")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, additional_special_tokens=special[1:]
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(str(folder))
    return str(folder)


def write_lines(file: Path, lines: Iterable[Mapping[str, Any]]) -> str:
    """A JSONL file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(file)


def sums(num: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Instructions to add two numbers, of two owners in turn."""
    return [
        {"instruction": f"Add {k} and {k + 1}.", "input": "", "output": f"{2 * k + 1}", "who": "ab"[k % 2]}
        for k in range(first, first + num)
    ]
