"""Texts as blocks of tokens of a fixed length, the training samples of a language model.

A stream of tokens t_0 ... t_N is cut into non-overlapping windows: block k holds t_kT ... t_kT+T-1, and its targets are
the next tokens, t_kT+1 ... t_kT+T.  Every token but the first is a target exactly once, with only its block as
context.  The last block is padded, and padding has the target `IGNORED`.

[Note: train and test text] The end of a document is held out, not windows from its middle: the test text follows the
training text, and each is a stream of its own.  So no token of a test block occurs in a training block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedsign.data.base import Dataset, IntArray, Samples, Tokenizer
from fedsign.errors import DataError
from fedsign.tasks.base import IGNORED

_BREAKS = ("\n\n", "\n", " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text and its owner.  `is_whole`: it was not cut, so a model may learn its end."""

    text: str
    owner: int
    is_whole: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Tokens of a prompt [P] and of each choice [C], the choices' texts in UTF-8 bytes, and the right one's index."""

    prompt: IntArray
    choices: tuple[IntArray, ...]
    num_bytes: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens [N + 1] in order, a mask of scored ones [N + 1] (never the first), and their owner.

    `question`: the choices, if the example has some.
    """

    tokens: IntArray
    is_scored: npt.NDArray[np.bool_]
    owner: int
    question: Question | None = None


def text_of(file: Path) -> str:
    """The content of a text file.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8-sig")  # without the mark that editors on Windows write
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text ({error}); save it as UTF-8.") from error


def cut(document: Document, test_fraction: float) -> tuple[Document, Document]:
    """Cut a document into training and test text; see [Note: train and test text].

    The cut is after the first blank line in the last `test_fraction` of the characters; if there is none, after the
    first line break, space or character there.
    """
    text = document.text
    earliest = len(text) - int(test_fraction * len(text))
    found = ((text.find(mark, earliest), len(mark)) for mark in _BREAKS)
    # a mark at the very end of the text would leave the test part empty
    at = next(
        (position + length for position, length in found if position >= 0 and position + length < len(text)), earliest
    )
    # a cut at an end leaves one part empty and the other whole
    is_whole = at in (0, len(text))
    parts = [Document(text=part, owner=document.owner, is_whole=is_whole) for part in (text[:at], text[at:])]
    return parts[0], parts[1]


def numbers_of(owners: Sequence[str]) -> list[int]:
    """Each text's owner as an integer, by the sorted order of names."""
    # by name, so that the number does not depend on the order of the texts
    number_of = {owner: number for number, owner in enumerate(sorted(set(owners)))}
    return [number_of[owner] for owner in owners]


def stream_of(document: Document, tokenizer: Tokenizer) -> Stream:
    """A document's tokens between start and (if it is whole) end token; all but the first are scored."""
    inner, end = tokenizer.encode(document.text), [tokenizer.end_id] * document.is_whole
    tokens = np.array([tokenizer.start_id, *inner, *end], dtype=np.int64)
    is_scored = np.ones(len(tokens), dtype=np.bool_)
    is_scored[0] = False
    return Stream(tokens, is_scored, document.owner)


def blocks(stream: Stream, block_length: int, *, pad_id: int) -> tuple[IntArray, IntArray]:
    """Features and targets [n, T] of a stream, without blocks that score nothing.

    >>> stream = Stream(np.array([9, 5, 6, 7]), np.array([False, True, False, True]), 0)
    >>> [each.tolist() for each in blocks(stream, 2, pad_id=0)]
    [[[9, 5], [6, 0]], [[5, -100], [7, -100]]]
    """
    num_targets = len(stream.tokens) - 1
    num_blocks = -(-num_targets // block_length)
    features = np.full(num_blocks * block_length, pad_id, dtype=np.int64)
    targets = np.full(num_blocks * block_length, IGNORED, dtype=np.int64)
    features[:num_targets] = stream.tokens[:-1]
    targets[:num_targets] = np.where(stream.is_scored[1:], stream.tokens[1:], IGNORED)
    shape = (num_blocks, block_length)
    is_kept = (targets.reshape(shape) != IGNORED).any(axis=1)
    return features.reshape(shape)[is_kept], targets.reshape(shape)[is_kept]


def joined(parts: Sequence[tuple[IntArray, IntArray, int]], block_length: int) -> Samples:
    """Concatenate features and targets [n, T], each part with its owner."""
    nothing = [np.zeros((0, block_length), dtype=np.int64)]  # np.concatenate refuses an empty list
    owners = [owner for _, targets, owner in parts for _ in targets]
    return Samples(
        features=torch.from_numpy(np.concatenate(nothing + [features for features, *_ in parts])),
        targets=torch.from_numpy(np.concatenate(nothing + [targets for _, targets, _ in parts])),
        owners=torch.tensor(owners, dtype=torch.int64),
    )


def dataset_of(
    train: Sequence[Document], test: Sequence[Document], tokenizer: Tokenizer, *, block_length: int, where: str
) -> Dataset:
    """A data set from documents; `where` names their source in errors.

    Raises:
        DataError: a part has no text, or no full block.
    """
    parts: list[Samples] = []
    for part, documents in (("training", train), ("test", test)):
        streams = [stream_of(each, tokenizer) for each in documents if each.text]
        longest = max((len(stream.tokens) - 1 for stream in streams), default=0)
        if not longest:
            raise DataError(
                f"{where} leaves no text for the {part} part; give more text, or change data.test_fraction."
            )
        if part == "training" and block_length > longest:
            raise DataError(
                f"data.block_length={block_length} was given, but the longest document of {where} has {longest} "
                "tokens for training, so that no block would be full; lower it."
            )
        cut_up = [(*blocks(stream, block_length, pad_id=tokenizer.pad_id), stream.owner) for stream in streams]
        parts.append(joined(cut_up, block_length))
    return Dataset(train=parts[0], test=parts[1], class_names=(), text=tokenizer)
