"""Helpers for readers of image files: bytes to fractions, and errors for missing or damaged files."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedsign.data.base import Samples
from fedsign.errors import DataError, nearest


def folder_of(root: str) -> Path:
    """A folder as the user gave it, with `~` expanded."""
    return Path(root).expanduser()


def images(pixels: Any, labels: Any, *, where: Path) -> Samples:
    """Bytes [n, C, H, W] as fractions in [0, 1], with their labels [n]; tensors, arrays, or lists.

    Raises:
        DataError: the numbers of images and labels differ.
    """
    if len(pixels) != len(labels):
        raise DataError(f"{where} holds {len(pixels)} images but {len(labels)} labels; fetch the files again.")
    # contiguous first, while they are bytes: `to` alone would keep permuted strides
    features = torch.as_tensor(pixels).contiguous().to(torch.float32).div_(255)
    return Samples(features=features, targets=torch.as_tensor(labels).to(torch.int64))


def check_present(name: str, folder: Path, files: Sequence[str], remedy: str) -> None:
    """Raise DataError if files of a data set are missing in `folder`; it names them and tells how to get them."""
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise DataError(
            f"{name} was not found: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in "
            f"{folder.absolute()}. Put the files there, or name another folder with --set data.root=PATH; {remedy}"
        )


def check_classes(found: Iterable[Any], class_names: Sequence[str], *, where: str, kind: str = "the class") -> None:
    """Raise DataError for the first class found in `where` that is not in the configuration's `class_names`."""
    for name in map(str, found):
        if name not in class_names:
            shown = ", ".join(class_names[:20]) + (", ..." if len(class_names) > 20 else "")
            raise DataError(
                f"{where} has {kind} '{name}', which is none of data.class_names ({shown}); rename it, leave it out, "
                f"or add it to data.class_names at every site.{nearest(name, class_names)}"
            )


@contextmanager
def sentence_where_damaged(folder: Path) -> Iterator[None]:
    """A context manager: errors of torchvision's readers, such as a wrong checksum, become DataErrors."""
    try:
        yield
    except (AssertionError, EOFError, KeyError, OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"a file in {folder.absolute()} is damaged or not the official one ({error}); remove it and fetch it again."
        ) from error
