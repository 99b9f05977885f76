"""Write cifar10.npz: the first images of each class, from folders `train` and `test` with a subfolder per class.

python -m benchmarks.ablations.cifar10 FOLDER cifar10.npz
"""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

PER_CLASS = {"train": 1_000, "test": 500}


def main(folder: Path, to: Path) -> None:
    """Write the arrays in the format of `data.name=npz`."""
    names = sorted(path.name for path in (folder / "train").iterdir())
    train, test = (_stacked([folder / part / name for name in names], count) for part, count in PER_CLASS.items())
    np.savez_compressed(to, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1], class_names=names)


def _stacked(classes: list[Path], count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    images, labels = [], []
    for label, folder in enumerate(classes):
        files = sorted(path for path in folder.iterdir() if path.suffix in (".jpg", ".png"))[:count]
        images += [np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1) for file in files]
        labels += [label] * len(files)
    return np.stack(images), np.array(labels)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
