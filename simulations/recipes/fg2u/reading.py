"""What `online-adaptation` reads and is asked: passages of Python's help texts, and what follows them.

A document is cut into windows of `LENGTH` characters, and these into excerpts of twelve: the six passages, at even places, are read; the window after
each holds the questions.  The answers are those characters of the questions that lie in a word of four letters or more which begins in
one of the excerpt's passages, too: what can be known of having read them.

Of paragraphs of 40 characters or more that stand in several documents one is kept: no part of the documents knows another by heart.
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
IN_WORD, NUM_FEATURES = 2 + len(_KINDS) + 1, 2 + len(_KINDS) + 3  # the place of one feature, and how many there are


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Documents to train the model on, to learn weights on, and to judge them on; the first ones' characters and words."""

    pretraining: Sequence[str]
    learning: Sequence[str]
    judging: Sequence[str]
    tokenizer: Characters
    word_counts: Counter[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Excerpt:
    """What is read, a step each, and the questions afterwards: tokens and those that follow them [p, LENGTH], and which of the latter are answers."""

    passages: Sequence[Passage]
    tokens: Tensor
    targets: Tensor
    is_answer: Tensor


@lru_cache
def texts() -> Texts:
    """By length, every second document is to train on; the others are in turn to judge and to learn on."""
    from pydoc_data.topics import topics

    names, seen = sorted(topics, key=lambda name: (-len(topics[name]), name)), set[str]()
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
    """A text without the long paragraphs that were seen; its own are seen from now on."""
    kept = [each for each in text.split(_PARAGRAPH) if len(each) < _NOTABLE or each.strip() not in seen]
    seen.update(each.strip() for each in kept)
    return _PARAGRAPH.join(kept)


def windows(text: str) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them [n, LENGTH]; what is left over at the end is dropped."""
    tokens = torch.tensor(texts().tokenizer.encode(text))
    end = (len(tokens) - 1) // LENGTH * LENGTH
    return tokens[:end].view(-1, LENGTH), tokens[1 : end + 1].view(-1, LENGTH)


def stream(excerpts: Sequence[Excerpt]) -> Excerpt:
    """Excerpts one after another; all questions come at the end."""
    return Excerpt(
        passages=[passage for each in excerpts for passage in each.passages],
        tokens=torch.cat([each.tokens for each in excerpts]),
        targets=torch.cat([each.targets for each in excerpts]),
        is_answer=torch.cat([each.is_answer for each in excerpts]),
    )


@torch.no_grad()
def excerpts(documents: Sequence[str], reader: Reader, theta: Tensor) -> list[Excerpt]:
    """All of the documents; `theta` [M] is the model whose surprise is a feature of every token."""
    return [excerpt for text in documents for excerpt in _of_document(text, reader, theta)]


def _of_document(text: str, reader: Reader, theta: Tensor) -> Iterator[Excerpt]:
    size = 2 * PASSAGES_OF_EXCERPT
    tokens, targets = windows(text)
    if len(tokens) < size:
        return
    words, places = _words(text)
    features = _features(text, words, places, reader.logits(theta, tokens), targets)
    for first in range(0, len(tokens) - size + 1, size):
        read, asked = (list(range(first + part, first + size, 2)) for part in (0, 1))
        told = {words[at] for window in read for at in _characters(window) if places[at] == 0}
        is_answer = [
            [words[at] in told and at - places[at] in _characters(window) for at in _characters(window)]
            for window in asked
        ]
        yield Excerpt(
            passages=[Passage(*(each[window : window + 1] for each in (tokens, targets, features))) for window in read],
            tokens=tokens[asked],
            targets=targets[asked],
            is_answer=torch.tensor(is_answer),
        )


def _characters(window: int) -> range:
    """Where a window's targets stand in the text."""
    return range(window * LENGTH + 1, (window + 1) * LENGTH + 1)


def _words(text: str) -> tuple[list[str], list[int]]:
    """Of each character the word that it lies in, empty for none, and its place there, -1 for none."""
    words, places = [""] * len(text), [-1] * len(text)
    for found in _WORD.finditer(text):
        for place, at in enumerate(range(*found.span())):
            words[at], places[at] = found.group(), place
    return words, places


def _features(text: str, words: Sequence[str], places: Sequence[int], logits: Tensor, targets: Tensor) -> Tensor:
    """Of each target [n, LENGTH, F], all of about the size 1.

    The model's surprise and its entropy; the kind of character; the place in the word, whether there is one, and how often the model has seen it.
    """
    end = targets.numel() + 1
    logs = logits.log_softmax(-1)
    surprise = -logs.gather(-1, targets[..., None])
    entropy = -(logs.exp() * logs).sum(-1, keepdim=True)
    counts = texts().word_counts
    of_text: list[list[float]] = [
        [float(kind(each)) for each in text[1:end] for kind in _KINDS],
        [place / 4 for place in places[1:end]],
        [float(bool(word)) for word in words[1:end]],
        [log(1 + counts[word]) / 4 if word else 0.0 for word in words[1:end]],
    ]
    columns = [torch.tensor(each).view(*targets.shape, -1) for each in of_text]
    return torch.cat([surprise / 2, entropy / 2, *columns], dim=-1)
