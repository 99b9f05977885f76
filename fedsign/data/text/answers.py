"""The answers in blocks of tokens: what precedes each, and what a model should generate.

In a document, an answer is a run of scored tokens behind a prompt, which is everything before it.  A document that is
scored from its first token on, such as a text or a line with data.score=all, has none.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedsign.data.base import AnySamples
from fedsign.tasks.base import IGNORED
from fedsign.tasks.documents import split


class Answer(NamedTuple):
    """Tokens [P] of a prompt and [A] of its answer."""

    prompt: Tensor
    tokens: Tensor


def places_of(samples: AnySamples) -> Tensor:
    """Row and column of the first scored token of each answer, [n, 2]."""
    is_start = _document_starts(samples)
    is_scored = samples.targets.cpu() != IGNORED
    before = is_scored.roll(1, dims=1)
    before[:, 0] = False
    return (is_scored & ~before & ~is_start).nonzero()


def answers_at(samples: AnySamples, places: Tensor) -> list[Answer]:
    """The answers at some places."""
    tokens, targets, is_start = split(samples.features)[0].cpu(), samples.targets.cpu(), _document_starts(samples)
    found = []
    for row, first in places.tolist():
        start = int(is_start[row, : first + 1].nonzero()[-1])
        # it ends where nothing is scored, or another document starts
        ends = ((targets[row, first:] == IGNORED) | is_start[row, first:]).nonzero()
        stop = first + int(ends[0]) if len(ends) else targets.shape[1]
        found.append(Answer(tokens[row, start : first + 1], targets[row, first:stop]))
    return found


def _document_starts(samples: AnySamples) -> Tensor:
    tokens, positions = split(samples.features)
    if positions is not None:
        return positions.cpu() == 0
    is_start = torch.zeros(tokens.shape, dtype=torch.bool)
    is_start[:, 0] = True
    return is_start
