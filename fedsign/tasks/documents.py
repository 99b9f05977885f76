"""Packed documents: several per row of tokens, each processed as if it were alone.

[Note: tokens and positions] A row of tokens is [T].  A row of packed documents is [T, 2], each token with its position
in its document, counted from 0.  A position of 0 thus begins a document.  Models take batches of either, [B, T] or
[B, T, 2].  In a packed row, positions count from the document's start, and attention does not leave it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_PAIR = 2  # token and position


def is_row_of_tokens(input_shape: tuple[int, ...]) -> bool:
    """Whether a sample is a row of tokens, packed or not.

    >>> is_row_of_tokens((128,)), is_row_of_tokens((128, 2)), is_row_of_tokens((3, 32, 32))
    (True, True, False)
    """
    return len(input_shape) == 1 or input_shape[1:] == (_PAIR,)


def split(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """The tokens [B, T] of a batch, and their positions [B, T] if documents are packed."""
    if rows.dim() != 3:
        return rows, None
    return rows[..., 0], rows[..., 1]


def attention_mask(positions: Tensor) -> Tensor:
    """True where a token [B, 1, T, 1] attends to another [B, 1, 1, T]: to itself and earlier ones of its document.

    >>> attention_mask(torch.tensor([[0, 1, 0]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    document = (positions == 0).cumsum(dim=1)  # [B, T]
    is_same = document[:, None, :, None] == document[:, None, None, :]
    return is_same.tril()


def packed(documents: Sequence[Tensor]) -> Tensor:
    """One row [1, T, 2] of documents' tokens.

    >>> packed([torch.tensor([5, 6]), torch.tensor([7])]).tolist()
    [[[5, 0], [6, 1], [7, 0]]]
    """
    positions = torch.cat([torch.arange(len(tokens)) for tokens in documents])
    return torch.stack([torch.cat([*documents]), positions], dim=-1)[None]
