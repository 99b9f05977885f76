"""English text that ships with Python: what `help()` says of the language's topics, about 465,000 characters in 79 documents.

A document, which is an owner, is a topic, in alphabetical order.  The text differs a little between versions of Python,
and so do runs on it; the vocabulary and the number of documents follow from what is there.

[Note: repeated paragraphs] Topics share paragraphs, and two are the same.  From the test text are left out
paragraphs of `_NOTABLE` characters or more that stand in the training text of any document: a model could know them by heart.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedsign.data.base import Dataset
from fedsign.data.text.blocks import Document, cut, dataset_of
from fedsign.data.text.tokenizers import BuiltIn, reads_text, tokenizer_of

_NOTABLE = 40
_PARAGRAPH = "\n\n"


@reads_text
def pytext(
    seed: int,
    *,
    tokenizer: BuiltIn = "character",
    block_length: Annotated[int, Field(ge=1, le=2**20)] = 128,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1,
) -> Dataset:
    """Blocks [n, block_length] of tokens; the last `test_fraction` of every document is for the test, whatever the seed.

    >>> pytext(0).input_shape, pytext(0).num_outputs > 80
    ((128,), True)
    """
    from pydoc_data.topics import topics

    documents = [Document(text=topics[name], owner=owner) for owner, name in enumerate(sorted(topics))]
    train, test = zip(*(cut(document, test_fraction) for document in documents), strict=True)
    known = _PARAGRAPH.join(document.text for document in train)
    return dataset_of(
        train,
        [_without(document, known) for document in test],
        tokenizer_of(tokenizer, (document.text for document in train)),
        block_length=block_length,
        where="data.name=pytext",
    )


def _without(document: Document, known: str) -> Document:
    """See [Note: repeated paragraphs]."""
    new = [each for each in document.text.split(_PARAGRAPH) if len(each) < _NOTABLE or each.strip() not in known]
    return replace(document, text=_PARAGRAPH.join(new))
