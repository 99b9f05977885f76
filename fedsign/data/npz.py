"""NumPy's .npz: the arrays x_train, y_train, x_test, y_test; or x and y, which are split by the seed.

Optional arrays: owners (owners_train beside x_train), one integer per training sample; class_names.  Bytes (uint8) are
scaled to [0, 1].  Integers and texts as targets are classes, texts in sorted order; real targets are those of a
regression.

Integers are positions in the array class_names.  Without it, a class is named by its number: labels from 0 keep it as
their position, so that a number in between may be a class without samples; labels from 1 on, or of -1 and 1, are
classes in sorted order, which `Dataset.read_as` says.

The setting `class_names` lists the classes in order.  Labels are indices into it; or, if the file has class_names of
its own, they are mapped by name.
"""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.format import MAGIC_PREFIX
from pydantic import Field

from fedsign.data.base import Dataset, Samples, features_of
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
    arrays = _labelled(_read(file), file)
    if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
        train, test = (_samples(arrays, part, channels, file) for part in ("_train", "_test"))
    elif {"x", "y"} <= arrays.keys():
        whole = _samples(arrays, "", channels, file)
        rows = train_test(len(whole), seed, test_fraction)
        train, test = whole[rows[0]], whole[rows[1]]
    else:
        raise DataError(
            f"{file} holds the arrays {', '.join(sorted(arrays)) or 'none'}; expected x_train, y_train, x_test "
            "and y_test, or x and y."
        )
    if class_names:
        train, test = (_among(part, arrays, class_names, file) for part in (train, test))
        return Dataset(train=train, test=test, class_names=class_names)
    if train.targets.is_floating_point():
        return Dataset(train=train, test=test, class_names=())
    if "class_names" in arrays:
        return Dataset(train=train, test=test, class_names=tuple(str(name) for name in arrays["class_names"]))
    return _numbered(train, test, file)


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


def _labelled(arrays: Arrays, file: Path) -> Arrays:
    """The arrays with labels instead of texts as targets: indices into class_names."""
    targets = {name: arrays[name] for name in ("y_train", "y", "y_test") if name in arrays}
    if all(each.dtype.kind != "U" for each in targets.values()):
        return arrays
    texts = {name: each.astype(str) for name, each in targets.items()}
    known = arrays.get("class_names", np.unique(next(iter(texts.values())))).astype(str)
    labels = {text: label for label, text in enumerate(known.tolist())}
    for name, each in texts.items():
        unknown = next((text for text in each.ravel().tolist() if text not in labels), None)
        if unknown is not None:
            remedy = "add it to class_names" if "class_names" in arrays else "give y_train samples of it"
            raise DataError(
                f"{file} has the class '{unknown}' in {name}, but the classes are {', '.join(labels)}; {remedy}, or "
                f"leave its samples out of {name}."
            )
    found: Arrays = {"class_names": known}
    for name, each in texts.items():
        found[name] = np.array([labels[text] for text in each.ravel().tolist()]).reshape(each.shape)
    return arrays | found


def _samples(arrays: Arrays, part: str, channels: str, file: Path) -> Samples:
    """The samples of the arrays whose names end in `part`; owners of test samples have no meaning."""
    x, y = arrays[f"x{part}"], arrays[f"y{part}"]
    owners = None if part == "_test" else arrays.get(f"owners{part}")
    if not {x.dtype.kind, y.dtype.kind} <= set("buif"):
        raise DataError(f"{file} holds x of {x.dtype} and y of {y.dtype}; expected numbers, or texts as y.")
    if x.ndim < 2 or len(x) != len(y) or (owners is not None and len(owners) != len(x)):
        sizes = f"x of the shape {list(x.shape)} and y of {list(y.shape)}"
        raise DataError(f"{file} holds {sizes}; expected one sample a row in x, and one target (and owner) for each.")
    if y.ndim == 2 and (remedy := _flat(y)):
        raise DataError(f"{file} holds y of the shape {list(y.shape)}; give one target for each sample: {remedy}.")
    for name in (f"x{part}", f"y{part}"):
        _check_finite(name, arrays[name], file)
    features = features_of(np.moveaxis(x, -1, 1) if channels == "last" else x)
    return Samples(
        features=features,
        targets=torch.from_numpy(y.astype(np.float32 if y.dtype.kind == "f" else np.int64)),
        owners=None if owners is None else torch.from_numpy(owners.astype(np.int64)),
    )


def _check_finite(name: str, values: npt.NDArray[Any], file: Path) -> None:
    wrong = ~np.isfinite(values)
    if num := int(wrong.sum()):
        at = np.unravel_index(int(wrong.argmax()), values.shape)
        raise DataError(
            f"{file} holds {num} value{'s' if num > 1 else ''} in {name} that {'are' if num > 1 else 'is'} NaN or "
            f"infinite, the first at {name}[{', '.join(map(str, at))}]; fill in or leave out what is missing."
        )


def _flat(y: npt.NDArray[Any]) -> str:
    """How to turn a column, or rows of one 1 among zeros, into one target for each sample; empty for other targets."""
    if y.shape[1] == 1:
        return "y.ravel()"
    is_one_hot = ((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all()
    return "y.argmax(axis=1), which undoes the one-hot encoding" if is_one_hot else ""


def _among(samples: Samples, arrays: Arrays, class_names: tuple[str, ...], file: Path) -> Samples:
    """The samples with labels as indices into `class_names`."""
    if samples.targets.is_floating_point():
        raise DataError(f"data.class_names was given, but {file} holds real targets; leave it out for a regression.")
    labels = samples.targets.tolist()
    if "class_names" in arrays:
        own = [str(name) for name in arrays["class_names"]]
        # checked explicitly: a label of -1 would silently take the last name
        names = [own[label] if 0 <= label < len(own) else str(label) for label in labels]
        check_classes(dict.fromkeys(names), class_names, where=str(file))
        return replace(samples, targets=torch.tensor([class_names.index(name) for name in names], dtype=torch.int64))
    unknown = next((label for label in labels if not 0 <= label < len(class_names)), None)
    if unknown is not None:
        raise DataError(
            f"{file} has the class {unknown}, but data.class_names names {len(class_names)}, and labels are "
            f"positions in it, from 0 to {len(class_names) - 1}; correct the labels, or name the class at every site."
        )
    return samples


def _numbered(train: Samples, test: Samples, file: Path) -> Dataset:
    """A data set whose classes are named by their numbers."""
    labels = np.unique(torch.cat([train.targets.flatten(), test.targets.flatten()]).numpy())
    # other negative labels stay, and are refused later: -1 may stand for "unlabeled"
    if not len(labels) or (labels[0] < 1 and labels.tolist() != [-1, 1]):
        names = tuple(str(label) for label in range(labels.max(initial=-1) + 1))
        return Dataset(train=train, test=test, class_names=names)
    known = torch.from_numpy(labels)
    train, test = (replace(part, targets=torch.searchsorted(known, part.targets)) for part in (train, test))
    read_as = f"the labels of {file} are {_listed(labels)}; model outputs are numbered from 0, in this order."
    return Dataset(train=train, test=test, class_names=tuple(map(str, labels.tolist())), read_as=(read_as,))


def _listed(labels: npt.NDArray[np.int64]) -> str:
    numbers = [*map(str, labels.tolist())]
    return ", ".join(numbers if len(numbers) <= 4 else [*numbers[:2], "...", numbers[-1]])
