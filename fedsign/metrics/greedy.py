"""Greedy decoding: the likeliest token, again and again.

A model may bring its own, as a method `greedy(prompts, *, num, end_id, pad_id)` that returns tokens [B, num or fewer];
any other is run over all tokens for each new one.  Its rows are padded on the right, which a causal model does not see.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.numerics import Numerics


def greedy(
    model: nn.Module, prompts: Sequence[Tensor], numerics: Numerics, *, num: int, end_id: int, pad_id: int
) -> list[Tensor]:
    """The continuation of each prompt, `num` tokens at most, without the end token and what follows it."""
    own: Any = getattr(model, "greedy", None)
    prompts = [prompt.to(numerics.device) for prompt in prompts]
    if own is None:
        rows = _greedy(model, prompts, numerics, num=num, end_id=end_id, pad_id=pad_id)
    else:
        with numerics.reduced():
            rows = own(prompts, num=num, end_id=end_id, pad_id=pad_id)
    return [until_end(row, end_id) for row in rows.cpu()]


def until_end(tokens: Tensor, end_id: int) -> Tensor:
    """The tokens before the first end token.

    >>> until_end(torch.tensor([5, 6, 0, 7, 0]), 0).tolist()
    [5, 6]
    """
    ends = (tokens == end_id).nonzero()
    return tokens[: int(ends[0])] if len(ends) else tokens


def _greedy(
    model: nn.Module, prompts: Sequence[Tensor], numerics: Numerics, *, num: int, end_id: int, pad_id: int
) -> Tensor:
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=numerics.device)
    index, longest = torch.arange(len(prompts), device=numerics.device), int(lengths.max())
    rows = lengths.new_full((len(prompts), longest + num), pad_id)  # [B, T]
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    new = lengths.new_full((len(prompts), num), end_id)  # [B, num]
    for step in range(num):
        logits = numerics.outputs(model, rows[:, : longest + step], channels_last=False)
        chosen = logits[index, lengths + step - 1].argmax(dim=-1)
        rows[index, lengths + step] = new[:, step] = chosen
        if bool((new[:, : step + 1] == end_id).any(dim=1).all()):
            break
    return new
