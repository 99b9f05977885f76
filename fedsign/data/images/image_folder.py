"""Images in folders, one folder per class: `root`/train/CLASS/*.png and `root`/test/CLASS/*.png, or `root`/CLASS/*.png.

What is listed: `fedsign.data.images.listing`; how an image is read: `fedsign.data.pixels`.  Images of another size are
scaled to cover a square of `size` pixels, and center-cropped.

`class_names` lists the classes in order: a folder of another name is an error, but a class may lack a folder.  Without
it, the classes are the sorted folder names.

[Note: in memory or not] As float32, n images take n * channels * size^2 * 4 bytes.  With `in_memory = "auto"`, they are
read once and kept if that is at most `_MAX_BYTES`; otherwise, every batch is read from disk, and only `_NUM_EXAMINED`
images are described.  Each process of an engine has its own copy.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedsign.data.base import AnySamples, Dataset, Frame, LazySamples, Samples, features_of
from fedsign.data.files import check_classes, folder_of
from fedsign.data.images.listing import class_files
from fedsign.data.normalize import IDENTITY, Normalization
from fedsign.data.pixels import decoded
from fedsign.data.splitting import train_test
from fedsign.errors import DataError
from fedsign.storage.digests import digest_of
from fedsign.traits import declares

if TYPE_CHECKING:
    from PIL.Image import Image

InMemory = Literal["auto", "always", "never"]
_MAX_BYTES = 4 * 2**30  # training and test images together
_NUM_EXAMINED = 32


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
        train_part, test_part = listing(folder / "train"), listing(folder / "test")
        train_part.left_out["beside train and test"] = len(list(folder.iterdir())) - 2
        return dataset_of(train_part, test_part, in_memory)
    listed = listing(folder)
    index, samples = train_test(len(listed), seed, test_fraction), listed.samples(in_memory, num_images=len(listed))
    return _dataset(samples[index[0]], samples[index[1]], listed)


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
    return replace(_dataset(parts[0], parts[1], train, test), normalization=normalization)


class Listing:
    """The images in class folders, sorted by name; an item is read on access."""

    def __init__(self, folder: Path, *, size: int, channels: int, class_names: tuple[str, ...] = ()) -> None:
        try:
            # with agreed classes, a site may lack the images of some
            files, self.left_out = class_files(folder, may_be_empty=bool(class_names))
        except OSError as error:
            raise DataError(
                f"{folder.absolute()} is no folder of class folders with images ({error}). Expected "
                f"{folder}/CLASS/IMAGE for every class; name another folder with --set data.root=PATH."
            ) from error
        self.folder = folder
        self.kinds = Counter[str]()  # of the images examined
        self._files = [file for of_class in files.values() for file in of_class]
        self._shape = (channels, size, size)
        self.class_names: tuple[str, ...] = class_names or tuple(files)
        check_classes(files, self.class_names, where=str(folder.absolute()), kind="the class folder")
        position = {name: index for index, name in enumerate(self.class_names)}
        # the model's outputs follow class_names, not the sorted folders
        labels = [position[name] for name, of_class in files.items() for _ in of_class]
        self.targets = torch.tensor(labels, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, position: int) -> Tensor:
        """Features [channels, size, size]."""
        return self._fitted(self._read(position)[0])

    @property
    def fingerprint(self) -> str:
        """The digest of the files' names and sizes, for images that are not in memory."""
        names = (f"{Path(file).relative_to(self.folder)} {Path(file).stat().st_size}\n" for file in self._files)
        return digest_of(*map(str.encode, names))

    def samples(self, in_memory: InMemory, *, num_images: int) -> AnySamples:
        """The images as samples, by [Note: in memory or not]; `num_images` counts all folders of the data set."""
        fits = num_images * prod(self._shape) * 4 <= _MAX_BYTES
        if in_memory == "never" or (in_memory == "auto" and not fits):
            for position in np.linspace(0, len(self) - 1, min(_NUM_EXAMINED, len(self))).astype(int):
                self.kinds.update(self._read(position)[1])
            return LazySamples(source=self, targets=self.targets)
        # Filled in place: a list and its stack would take twice the memory.
        features = torch.empty(len(self), *self._shape)
        for position in range(len(self)):
            image, kinds = self._read(position)
            features[position] = self._fitted(image)
            self.kinds.update(kinds)
        return Samples(features=features, targets=self.targets)

    def _read(self, position: int) -> tuple["Image", list[str]]:
        """An image, and what its reader should know of it."""
        from PIL import Image

        file = self._files[position]
        try:
            with Image.open(file) as opened:
                # decodes the file, so damage is noticed within the try; open() reads only its header
                return decoded(opened, "RGB" if self._shape[0] == 3 else "L")
        except DataError as error:
            raise DataError(f"the image {file} {error}, or remove it.") from error
        except MemoryError:
            raise
        except Exception as error:  # of any type: Pillow's readers of damaged files
            raise DataError(f"the image {file} cannot be read ({error}); replace or remove it.") from error

    def _fitted(self, image: "Image") -> Tensor:
        """Features of an image; one of more than 8 bits is gray."""
        from PIL import Image, ImageOps

        if image.size != self._shape[1:]:
            image = ImageOps.fit(image, self._shape[1:], method=Image.Resampling.BILINEAR)
        return features_of(image).expand(self._shape)


def _dataset(train: AnySamples, test: AnySamples, *listings: Listing) -> Dataset:
    """A data set, with sentences about how its images were listed and read."""
    num_images = sum(map(len, listings))
    kinds = sum((each.kinds for each in listings), Counter[str]())
    depths = {kind: count for kind, count in kinds.items() if kind.startswith("of ")}
    num_examined, left_out = sum(depths.values()), sum((each.left_out for each in listings), Counter[str]())
    examined = "" if num_examined == num_images else f", of which {num_examined:,} were examined"
    said = (f"{'all' if count == num_examined else f'{count:,}'} {kind}" for kind, count in kinds.most_common())
    read_as = [f"{num_images:,} images{examined}: {', '.join(said)}"]
    if left_out:
        read_as.append(f"left out: {', '.join(f'{count:,} {what}' for what, count in left_out.most_common())}")
    note = (
        f"images of different depths are mixed, {' and '.join(depths)}; if the classes differ in it, a model learns "
        "the depth: save all of them alike."
    )
    return Dataset(
        train=train,
        test=test,
        class_names=listings[0].class_names,
        read_as=tuple(read_as),
        notes=(note,) if len(depths) > 1 else (),
    )
