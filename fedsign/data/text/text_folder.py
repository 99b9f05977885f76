"""Text files in a folder: `root`/*.txt, one document each, or `root`/OWNER/*.txt, with a folder per owner.

If there are folders `root`/train and `root`/test with that layout, they are the split.  Otherwise, the last
`test_fraction` of every document is for testing (see [Note: train and test text] in fedsign.data.text.blocks).  Files
must be UTF-8 and end in .txt; others are ignored.  Passages that occur in two documents are not detected.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedsign.data.base import Dataset
from fedsign.data.files import folder_of
from fedsign.data.text.blocks import Document, cut, dataset_of, numbers_of, text_of
from fedsign.data.text.tokenizers import reads_text, tokenizer_of
from fedsign.errors import DataError

_PARTS = ("train", "test")


@reads_text
def text_folder(
    seed: int,
    *,
    root: str = "data",
    tokenizer: str = "byte",
    block_length: Annotated[int, Field(ge=1, le=2**20)] = 128,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1,
) -> Dataset:
    """Blocks [n, block_length] of tokens.

    Args:
        tokenizer: `byte`, `character`, or the folder of a Hugging Face tokenizer.
        test_fraction: applies without folders train and test.

    Raises:
        DataError: there is no text, or a file is empty or not UTF-8.
    """
    folder = folder_of(root)
    is_split = all((folder / part).is_dir() for part in _PARTS)
    files = [_files(folder / part) for part in _PARTS] if is_split else [_files(folder)]
    # numbered over both parts, so that an owner has the same number in training and test
    numbers = iter(numbers_of([owner for part in files for owner, _ in part]))
    documents = [[_document(file, next(numbers)) for _, file in part] for part in files]
    train, test = documents if is_split else zip(*(cut(each, test_fraction) for each in documents[0]), strict=True)
    dataset = dataset_of(
        train,
        test,
        tokenizer_of(tokenizer, (document.text for document in train)),
        block_length=block_length,
        where=str(folder.absolute()),
    )
    return replace(dataset, notes=_beside(folder) if is_split else _alone(folder))


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Owner and path of every text, sorted by path."""
    files = sorted(path for path in folder.rglob("*.txt") if path.is_file())
    if not files:
        raise DataError(
            f"there is no file .txt in {folder.absolute()}; expected a text a file, or a folder of texts for each "
            "owner: name another folder with --set data.root=PATH."
        )
    # the owner's folder; a text directly below `root` is its own owner
    return [(path.relative_to(folder).parts[0], path) for path in files]


def _beside(folder: Path) -> tuple[str, ...]:
    """A sentence on texts that belong to neither part."""
    num = sum(path.relative_to(folder).parts[0] not in _PARTS for path in folder.rglob("*.txt") if path.is_file())
    return (f"{num:,} texts in {folder} lie beside its folders train and test, and are not read.",) if num else ()


def _alone(folder: Path) -> tuple[str, ...]:
    """A sentence on a folder named train or test that lacks its counterpart."""
    present, missing = ([part for part in _PARTS if (folder / part).is_dir() is exists] for exists in (True, False))
    return tuple(
        f"{folder / part} is one owner's folder like any other, since there is no folder '{missing[0]}' beside it."
        for part in present
    )


def _document(file: Path, owner: int) -> Document:
    text = text_of(file)
    if not text:
        raise DataError(f"the text {file} is empty; remove it or fill it.")
    return Document(text=text, owner=owner)
