"""Images in folders, one folder per class: `root`/train/CLASS/*.png and `root`/test/CLASS/*.png, or `root`/CLASS/*.png.

Reads any format that Pillow supports.  Images of another size are scaled to cover a square of `size` pixels, and
center-cropped.

`class_names` lists the classes in order: a folder of another name is an error, but a class may lack a folder.  Without
it, the classes are the sorted folder names.

[Note: in memory or not] As float32, n images take n * channels * size^2 * 4 bytes.  With `in_memory = "auto"`, they are
read once and kept if that is at most `_MAX_BYTES`; otherwise, every batch is read from disk.  Each process of an
engine has its own copy.
"""

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsign.data.base import AnySamples, Dataset, Frame, LazySamples, Samples, features_of
from fedsign.data.files import check_classes, folder_of
from fedsign.data.normalize import IDENTITY, Normalization
from fedsign.data.splitting import train_test
from fedsign.errors import DataError
from fedsign.torchvision_shim import torchvision
from fedsign.traits import declares

InMemory = Literal["auto", "always", "never"]
_MAX_BYTES = 4 * 2**30  # training and test images together


def _frame(settings: Mapping[str, Any]) -> Frame:
    return Frame(input_shape=(settings["channels"], settings["size"], settings["size"]))


@declares(frame=_frame)
def image_folder(
    seed: int,
    *,
    root: str = "data",
    size: Annotated[int, Field(ge=1, le=4096)] = 32,
    channels: Literal[1, 3] = 3,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    in_memory: InMemory = "auto",
    class_names: tuple[str, ...] = (),
) -> Dataset:
    """Features [n, channels, size, size] in [0, 1].  `test_fraction` applies without folders train and test."""
    folder, listing = folder_of(root), partial(Listing, size=size, channels=channels, class_names=class_names)
    if all((folder / part).is_dir() for part in ("train", "test")):
        return dataset_of(listing(folder / "train"), listing(folder / "test"), in_memory)
    listed = listing(folder)
    train, test = train_test(len(listed), seed, test_fraction)
    samples = listed.samples(in_memory, num_images=len(listed))
    return Dataset(train=samples[train], test=samples[test], class_names=listed.class_names)


def dataset_of(
    train: "Listing", test: "Listing", in_memory: InMemory, normalization: Normalization = IDENTITY
) -> Dataset:
    """A data set from a folder of training images and one of test images, with the same classes."""
    if train.class_names != test.class_names:
        odd = ", ".join(sorted(set(train.class_names) ^ set(test.class_names)))
        raise DataError(
            f"{train.folder} and {test.folder} do not have the same class folders: only one of them has {odd}."
        )
    parts = [each.samples(in_memory, num_images=len(train) + len(test)) for each in (train, test)]
    return Dataset(train=parts[0], test=parts[1], class_names=train.class_names, normalization=normalization)


class Listing:
    """The images in class folders, sorted by name; an item is read on access."""

    def __init__(self, folder: Path, *, size: int, channels: int, class_names: tuple[str, ...] = ()) -> None:
        try:
            # with agreed classes, a site may lack the images of some
            images = torchvision("torchvision.datasets").ImageFolder(folder, allow_empty=bool(class_names))
        except OSError as error:
            raise DataError(
                f"{folder.absolute()} is no folder of class folders with images ({error}). Expected "
                f"{folder}/CLASS/IMAGE for every class; name another folder with --set data.root=PATH."
            ) from error
        self.folder = folder
        self._files: list[str] = [path for path, _ in images.samples]
        self._shape = (channels, size, size)
        self.class_names: tuple[str, ...] = class_names or tuple(images.classes)
        check_classes(images.classes, self.class_names, where=str(folder.absolute()), kind="the class folder")
        position = {name: index for index, name in enumerate(self.class_names)}
        # torchvision numbers the folders that exist, in sorted order; the model's outputs follow class_names
        self.targets = torch.tensor([position[images.classes[label]] for label in images.targets], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, position: int) -> Tensor:
        """Features [channels, size, size]."""
        return features_of(_read(self._files[position], self._shape))

    def samples(self, in_memory: InMemory, *, num_images: int) -> AnySamples:
        """The images as samples, by [Note: in memory or not]; `num_images` counts all folders of the data set."""
        fits = num_images * prod(self._shape) * 4 <= _MAX_BYTES
        if in_memory == "never" or (in_memory == "auto" and not fits):
            return LazySamples(source=self, targets=self.targets)
        # Filled in place: a list and its stack would take twice the memory.
        features = torch.empty(len(self), *self._shape)
        for position in range(len(self)):
            features[position] = self[position]
        return Samples(features=features, targets=self.targets)


def _read(file: str, shape: tuple[int, int, int]) -> Any:
    """An image file, fitted to a shape [C, H, W]."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    try:
        with Image.open(file) as opened:
            # decodes the file, so damage is noticed within the try; open() reads only its header
            image = opened.convert("RGB" if channels == 3 else "L")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # all raised by Pillow
        raise DataError(f"the image {file} cannot be read ({error}); replace or remove it.") from error
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.BILINEAR)
    return image
