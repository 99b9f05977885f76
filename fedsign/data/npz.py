"""NumPy's .npz: the arrays x_train, y_train, x_test, y_test; or x and y, which are split by the seed.

Optional arrays: owners (owners_train beside x_train), one per training sample; class_names.  `fedsign.data.contract`
says what features, targets, and owners may be.  Integer labels are positions in the array class_names, if there is one.

The setting `class_names` lists the classes in order.  Labels are indices into it; or, if the file has class_names of
its own, they are mapped by name.
"""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.format import MAGIC_PREFIX
from pydantic import Field

from fedsign.data.base import Dataset, Samples
from fedsign.data.contract import met
from fedsign.data.files import check_classes
from fedsign.data.splitting import train_test
from fedsign.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]


def npz(
    seed: int,
    *,
    path: str = "data.npz",
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    channels: Literal["first", "last"] = "first",
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """Features [n, ...] unchanged; with `channels = "last"`, images [n, H, W, C] become [n, C, H, W]."""
    file = Path(path).expanduser()
    arrays = _read(file)
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        train, test = (_samples(arrays, part, channels, file) for part in ("_train", "_test"))
    elif {"x", "y"} <= arrays.keys():
        whole = _samples(arrays, "", channels, file)
        train, test = (whole[rows] for rows in train_test(len(whole), seed, test_fraction))
    else:
        raise DataError(
            f"{file} holds the arrays {', '.join(sorted(arrays)) or 'none'}; expected x_train, y_train, x_test "
            "and y_test, or x and y."
        )
    own, is_real = arrays.get("class_names"), _is_real(arrays)
    if is_real and class_names:
        raise DataError(f"data.class_names was given, but {file} holds real targets; leave it out for a regression.")
    names = None if is_real else class_names if own is None else tuple(map(str, own.tolist()))
    data = met(Dataset(train=train, test=test, class_names=()), names or None, where=f"{file} holds")
    return _among(data, class_names, file) if class_names and own is not None else data


def _read(file: Path) -> Arrays:
    if not file.is_file():
        raise DataError(f"there is no file {file.absolute()}; name it with --set data.path=PATH.")
    try:
        with file.open("rb") as opened:
            start = opened.read(len(MAGIC_PREFIX))
        # an .npy file, which np.load would return as a bare array without names
        if start == MAGIC_PREFIX:
            raise DataError(f"{file} holds one array without a name; write it with np.savez(path, x=..., y=...).")
        if not zipfile.is_zipfile(file):  # np.load would suggest allow_pickle
            raise DataError(
                f"{file} is no .npz file, or only a part of one; write it with np.savez(path, x=..., y=...)."
            )
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{file} cannot be read as .npz ({error}); write it again with np.savez(path, x=..., y=...)."
        ) from error


def _samples(arrays: Arrays, part: str, channels: str, file: Path) -> Samples:
    """The arrays whose names end in `part`; owners of test samples have no meaning."""
    x, y = arrays[f"x{part}"], arrays[f"y{part}"]
    owners = None if part == "_test" else arrays.get(f"owners{part}")
    if not ({x.dtype.kind} <= set("buif") and {y.dtype.kind} <= set("buifUS")):
        raise DataError(f"{file} holds x of {x.dtype} and y of {y.dtype}; expected numbers, or texts as y.")
    if x.ndim < 2 or len(x) != len(y) or (owners is not None and len(owners) != len(x)):
        sizes = f"x of the shape {list(x.shape)} and y of {list(y.shape)}"
        raise DataError(f"{file} holds {sizes}; expected one sample a row in x, and one target (and owner) for each.")
    for name in (f"x{part}", f"y{part}"):
        if arrays[name].dtype.kind == "f":
            _check_finite(name, arrays[name], file)
    features: Any = np.moveaxis(x, -1, 1) if channels == "last" else x
    return Samples(features=features, targets=cast(Any, y), owners=cast(Any, owners))


def _is_real(arrays: Arrays) -> bool:
    """Whether targets are real numbers: floats that are not one-hot rows."""
    return any(arrays[name].dtype.kind == "f" and arrays[name].ndim == 1 for name in ("y", "y_train") if name in arrays)


def _check_finite(name: str, values: npt.NDArray[Any], file: Path) -> None:
    wrong = ~np.isfinite(values)
    if num := int(wrong.sum()):
        at = np.unravel_index(int(wrong.argmax()), values.shape)
        raise DataError(
            f"{file} holds {num} value{'s' if num > 1 else ''} in {name} that {'are' if num > 1 else 'is'} NaN or "
            f"infinite, the first at {name}[{', '.join(map(str, at))}]; fill in or leave out what is missing."
        )


def _among(data: Dataset, class_names: tuple[str, ...], file: Path) -> Dataset:
    """The data set with labels as indices into `class_names`, instead of the file's own."""
    parts = []
    for part in (data.train, data.test):
        names = [data.class_names[label] for label in part.targets.tolist()]
        check_classes(dict.fromkeys(names), class_names, where=str(file))
        labels = torch.tensor([class_names.index(name) for name in names], dtype=torch.int64)
        parts.append(replace(part, targets=labels))
    return replace(data, train=parts[0], test=parts[1], class_names=class_names)
