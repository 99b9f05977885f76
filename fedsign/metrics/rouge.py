"""ROUGE of generated answers (Lin 2004), as Google's package `rouge_score` computes it by default.

Words are runs of a-z and 0-9 in lower case, without stemming.  A score is the mean over examples of the F1 of the
words, pairs of words, or the longest common subsequence that an answer shares with its reference.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from fedsign.metrics.base import mean
from fedsign.metrics.generated import GENERATED
from fedsign.traits import declares

Words = list[str]


@declares(targets="text", inputs=GENERATED)
def rouge_1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Mean F1 of shared words, in [0, 1].

    >>> rouge_1(["a red cat"], ["the cat"])
    0.4
    """
    return _mean_f1(predictions, references, lambda one, other: _num_shared(one, other, 1), 1)


@declares(targets="text", inputs=GENERATED)
def rouge_2(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Mean F1 of shared pairs of successive words, in [0, 1]."""
    return _mean_f1(predictions, references, lambda one, other: _num_shared(one, other, 2), 2)


@declares(targets="text", inputs=GENERATED)
def rouge_l(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Mean F1 of the longest common subsequence of words, in [0, 1]."""
    return _mean_f1(predictions, references, _num_in_sequence, 1)


def _mean_f1(
    predictions: Sequence[str], references: Sequence[str], num_shared: Callable[[Words, Words], int], size: int
) -> float:
    """Mean F1 of what is shared, of units of `size` words."""

    def f1(one: Words, other: Words) -> float:
        # 2 P R / (P + R), with P = shared / units of one and R = shared / units of the other
        units = sum(max(0, len(words) - size + 1) for words in (one, other))
        return 2 * num_shared(one, other) / units if units else 0.0

    return mean([f1(_words(one), _words(other)) for one, other in zip(predictions, references, strict=True)])


def _words(text: str) -> Words:
    return re.findall("[a-z0-9]+", text.lower())


def _num_shared(one: Words, other: Words, size: int) -> int:
    """The number of shared sequences of `size` words, each as often as in both."""
    counts = [Counter(zip(*(words[start:] for start in range(size)), strict=False)) for words in (one, other)]
    return (counts[0] & counts[1]).total()


def _num_in_sequence(one: Words, other: Words) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for column, match in enumerate(other, start=1):
            diagonal, row[column] = row[column], diagonal + 1 if word == match else max(row[column], row[column - 1])
    return row[-1]
