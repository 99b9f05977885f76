"""Passages and questions of `online-adaptation`, cut from Python's help texts.

A document is cut into windows of `LENGTH` characters, and these into excerpts of twelve. The model reads the six
passages at even positions; the window after each holds the questions.  The answers are those characters of the
questions that lie in a word of four letters or more which begins in a passage of the same excerpt: characters that
reading the passages helps to predict.

Of paragraphs of 40 characters or more that occur in several documents, one copy is kept, so that training documents do
not reveal others.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log

import torch
from torch import Tensor

from fedsign.bilevel.adaptation import Passage, Reader
from fedsign.data.text.tokenizers import Characters

LENGTH, PASSAGES_OF_EXCERPT = 64, 6
_NOTABLE, _PARAGRAPH, _WORD = 40, "\n\n", re.compile(r"[A-Za-z_]{4,}")
_KINDS = (str.islower, str.isupper, str.isdigit, " ".__eq__, "\n".__eq__)
IN_WORD, NUM_FEATURES = 2 + len(_KINDS) + 1, 2 + len(_KINDS) + 3  # index of one feature, and the number of features


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Documents to train the model on, to learn weights on, and to judge them on; characters and words of the first."""

    pretraining: Sequence[str]
    learning: Sequence[str]
    judging: Sequence[str]
    tokenizer: Characters
    word_counts: Counter[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Excerpt:
    """An excerpt: passages to read in one step each, then questions. Tokens and targets are [p, LENGTH]."""

    passages: Sequence[Passage]
    tokens: Tensor
    targets: Tensor
    is_answer: Tensor


@lru_cache
def texts() -> Texts:
    """Sort documents by length: every second one is for training; the others alternate between judging and learning."""
    from pydoc_data.topics import topics

    # by length and name, which does not depend on the order in the module
    names, seen = sorted(topics, key=lambda name: (-len(topics[name]), name)), set[str]()
    # judging first: a paragraph that several documents share is dropped from those that train on it
    judging, learning, pretraining = (
        [_unseen(topics[name], seen) for name in part] for part in (names[3::4], names[1::4], names[::2])
    )
    return Texts(
        pretraining=pretraining,
        learning=learning,
        judging=judging,
        tokenizer=Characters.of(pretraining),
        word_counts=Counter(word for text in pretraining for word in _WORD.findall(text)),
    )


def _unseen(text: str, seen: set[str]) -> str:
    """Return a text without long paragraphs seen before, and mark its own as seen."""
    kept = [each for each in text.split(_PARAGRAPH) if len(each) < _NOTABLE or each.strip() not in seen]
    seen.update(each.strip() for each in kept)
    return _PARAGRAPH.join(kept)


def windows(text: str) -> tuple[Tensor, Tensor]:
    """Return tokens and targets [n, LENGTH]; the rest at the end is dropped."""
    tokens = torch.tensor(texts().tokenizer.encode(text))
    # - 1: the last window needs a target for its last token
    end = (len(tokens) - 1) // LENGTH * LENGTH
    return tokens[:end].view(-1, LENGTH), tokens[1 : end + 1].view(-1, LENGTH)


def stream(excerpts: Sequence[Excerpt]) -> Excerpt:
    """Concatenate excerpts; all questions come at the end."""
    return Excerpt(
        passages=[passage for each in excerpts for passage in each.passages],
        tokens=torch.cat([each.tokens for each in excerpts]),
        targets=torch.cat([each.targets for each in excerpts]),
        is_answer=torch.cat([each.is_answer for each in excerpts]),
    )


@torch.no_grad()
def excerpts(documents: Sequence[str], reader: Reader, theta: Tensor) -> list[Excerpt]:
    """Return all excerpts of the documents; `theta` [M] is the model whose surprise is a feature of every token."""
    return [excerpt for text in documents for excerpt in _of_document(text, reader, theta)]


def _of_document(text: str, reader: Reader, theta: Tensor) -> Iterator[Excerpt]:
    size = 2 * PASSAGES_OF_EXCERPT
    tokens, targets = windows(text)
    if len(tokens) < size:
        return
    words, positions = _words(text)
    features = _features(text, words, positions, reader.logits(theta, tokens), targets)
    for first in range(0, len(tokens) - size + 1, size):
        read, asked = (list(range(first + part, first + size, 2)) for part in (0, 1))
        # words that begin in a passage; a word cut off at a passage's start was not read as a whole
        told = {words[at] for window in read for at in _characters(window) if positions[at] == 0}
        is_answer = [
            [words[at] in told and at - positions[at] in _characters(window) for at in _characters(window)]
            for window in asked
        ]
        yield Excerpt(
            passages=[Passage(*(each[window : window + 1] for each in (tokens, targets, features))) for window in read],
            tokens=tokens[asked],
            targets=targets[asked],
            is_answer=torch.tensor(is_answer),
        )


def _characters(window: int) -> range:
    """Return the characters of a window's targets."""
    return range(window * LENGTH + 1, (window + 1) * LENGTH + 1)


def _words(text: str) -> tuple[list[str], list[int]]:
    """Return for each character its word, empty if none, and its position in the word, -1 if none."""
    words, positions = [""] * len(text), [-1] * len(text)
    for found in _WORD.finditer(text):
        for position, at in enumerate(range(*found.span())):
            words[at], positions[at] = found.group(), position
    return words, positions


def _features(text: str, words: Sequence[str], positions: Sequence[int], logits: Tensor, targets: Tensor) -> Tensor:
    """Return features of each target [n, LENGTH, F], scaled to about 1.

    These are the model's surprise and entropy, the kind of character, whether it is in a word and where, and how often
    the model has seen that word.
    """
    # feature i belongs to target i, which is character i + 1
    end = targets.numel() + 1
    logs = logits.log_softmax(-1)
    surprise = -logs.gather(-1, targets[..., None])
    entropy = -(logs.exp() * logs).sum(-1, keepdim=True)
    counts = texts().word_counts
    of_text: list[list[float]] = [
        [float(kind(each)) for each in text[1:end] for kind in _KINDS],
        [position / 4 for position in positions[1:end]],
        [float(bool(word)) for word in words[1:end]],
        [log(1 + counts[word]) / 4 if word else 0.0 for word in words[1:end]],
    ]
    # [n, LENGTH, features]
    columns = [torch.tensor(each).view(*targets.shape, -1) for each in of_text]
    return torch.cat([surprise / 2, entropy / 2, *columns], dim=-1)
