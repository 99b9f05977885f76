"""Exact match of generated answers."""

import re
import string
from collections.abc import Sequence

from fedsign.metrics.base import mean
from fedsign.metrics.generated import GENERATED
from fedsign.traits import declares

_PUNCTUATION = str.maketrans("", "", string.punctuation)


@declares(targets="text", inputs=GENERATED)
def exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Share of generated answers that equal the reference once both are normalized as in SQuAD, in [0, 1].

    >>> exact_match(["The  answer."], ["answer"])
    1.0
    """
    pairs = zip(predictions, references, strict=True)
    return mean([normalized(one) == normalized(other) for one, other in pairs])


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, and the, with single spaces.

    As the evaluation of SQuAD 1.1 (Rajpurkar et al. 2016, arXiv 1606.05250).
    """
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())
