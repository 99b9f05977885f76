"""English text that ships with Python: the `help()` topics, about 465,000 characters in 79 documents.

Each topic is a document and an owner, in alphabetical order.  The text differs slightly between Python versions, and so
do runs on it; vocabulary and number of documents follow from the text.

[Note: repeated paragraphs] Topics share paragraphs, and two topics are identical.  Paragraphs of `_NOTABLE` characters
or more that occur in any training text are removed from the test text: a model could have memorized them.
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
    """Blocks [n, block_length] of tokens; the last `test_fraction` of every document is for testing, whatever the seed.

    >>> pytext(0).input_shape, pytext(0).num_outputs > 80
    ((128,), True)
    """
    # here, because the module is 700 kB of text that other data sets do not need
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
    """Remove repeated paragraphs; see [Note: repeated paragraphs]."""
    new = [each for each in document.text.split(_PARAGRAPH) if len(each) < _NOTABLE or each.strip() not in known]
    return replace(document, text=_PARAGRAPH.join(new))
