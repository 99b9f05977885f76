"""What a dataset factory returns.

[Note: two kinds of samples] `Samples` holds features in memory.  `LazySamples` holds the targets only and
fetches features from a map-style torch Dataset for the samples that a batch asks for; for data that does
not fit.  Both answer `len`, `[index]` (a subset), `to(device)`, `batch(index)`, `batches(size)`, `shape`, `targets`
and `owners`; who trains or evaluates needs no more.

[Note: start and end] Every tokenizer has tokens that stand before a document and after it, so that a model is asked for a
document's first token, too, and learns where documents end.  For most they are the same one.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsign.data.normalise import IDENTITY, Normalization, Preset, measured
from fedsign.errors import DataError

IntArray = npt.NDArray[np.int64]
_CPU = torch.device("cpu")
_MEASURED_BATCH = 4096
_Class = TypeVar("_Class", bound=type)


class Source(Protocol):
    """A map-style torch Dataset: its items are (features, target, ...) tuples, or features alone."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Features [n, ...] (float) and targets [n] (int64 class labels, or real values), in memory.

    Of text: tokens [n, T] (int64), and as targets the tokens [n, T] that follow each, -100 where one is not scored.
    `owners` [n] (int64, from 0) says which natural client a sample belongs to; None where there are none.
    """

    features: Tensor
    targets: Tensor
    owners: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: IntArray) -> "Samples":
        owners = None if self.owners is None else self.owners[index]
        return Samples(features=self.features[index], targets=self.targets[index], owners=owners)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample's features."""
        return tuple(self.features.shape[1:])

    def to(self, device: torch.device) -> "Samples":
        """The same samples on a device."""
        return replace(self, features=self.features.to(device), targets=self.targets.to(device))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Features and targets of the samples at these positions."""
        return self.features[index], self.targets[index]

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in their order, `batch_size` at a time."""
        return zip(self.features.split(batch_size), self.targets.split(batch_size), strict=True)

    def normalized(self, normalization: Normalization) -> "Samples":
        """The same samples with normalized features."""
        return replace(self, features=normalization.apply(self.features))


@dataclass(frozen=True, kw_only=True, slots=True)
class LazySamples:
    """Targets [n] in memory; features are fetched from `source` for one batch at a time.

    An item's features may be a tensor, an array or a PIL image; bytes (uint8) are read as the fractions
    byte / 255.  `positions` [n] says which of the source's items these samples are; without it, all in order.
    """

    source: Source
    targets: Tensor
    owners: Tensor | None = None
    positions: Tensor | None = None
    normalization: Normalization = IDENTITY
    device: torch.device = _CPU

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: IntArray) -> "LazySamples":
        chosen = torch.from_numpy(index)
        return replace(
            self,
            targets=self.targets[chosen],
            owners=None if self.owners is None else self.owners[chosen],
            positions=self._positions(chosen),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample's features; fetches the first one."""
        return tuple(self.batch(torch.tensor([0]))[0].shape[1:])

    @property
    def features(self) -> Tensor:
        """All features at once, [n, ...]; for a share that fits in memory."""
        return self.batch(torch.arange(len(self)))[0]

    def to(self, device: torch.device) -> "LazySamples":
        """The same samples, whose batches come on a device."""
        return replace(self, device=device, targets=self.targets.to(device))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Features and targets of the samples at these positions; the features are fetched now.

        Raises:
            DataError: the samples have features of different shapes.
        """
        items = [features_of(self.source[position]) for position in self._positions(index).tolist()]
        shapes = {tuple(item.shape) for item in items}
        if len(shapes) > 1:
            first, second = sorted(shapes)[:2]
            raise DataError(
                f"samples have features of the shapes {list(first)} and {list(second)}; expected is one shape for all: "
                "let the data set crop or resize them."
            )
        return self.normalization.apply(torch.stack(items)).to(self.device), self.targets[index]

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in their order, `batch_size` at a time."""
        return map(self.batch, torch.arange(len(self)).split(batch_size))

    def normalized(self, normalization: Normalization) -> "LazySamples":
        """The same samples, whose batches come normalized."""
        return replace(self, normalization=self.normalization.then(normalization))

    def _positions(self, index: Tensor) -> Tensor:
        return index if self.positions is None else self.positions[index]


AnySamples = Samples | LazySamples


class Tokenizer(Protocol):
    """Texts to tokens, which are numbers from 0 to `vocabulary_size` - 1, and back."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def start_id(self) -> int:
        """See [Note: start and end]."""
        ...

    @property
    def end_id(self) -> int:
        """See [Note: start and end]."""
        ...

    @property
    def pad_id(self) -> int:
        """What fills a block up; no such position is ever scored."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


def fingerprint(tokenizer: Tokenizer | None) -> str:
    """What tells a tokenizer of a folder from others; empty for one that the configuration names whole."""
    return str(getattr(tokenizer, "fingerprint", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What a reader's settings alone say of its samples, so that data that lie apart fit one model; `remedy`: how to say their shape."""

    input_shape: tuple[int, ...] = ()  # empty: not known
    class_names: tuple[str, ...] = ()
    text: Tokenizer | None = None
    is_standardized: bool = False  # by default, with what is measured of the data
    remedy: str = "say it, such as --set 'partition.input_shape=[1, 28, 28]'"


def _takes_former_names(**names: str) -> Callable[[_Class], _Class]:
    """A class whose keywords had other names, which it takes for one release: former name = name."""

    def decorated(cls: _Class) -> _Class:
        init: Callable[..., None] = vars(cls)["__init__"]

        @wraps(init)
        def renaming(self: object, **given: Any) -> None:
            for former in names.keys() & given.keys():
                warnings.warn(f"{former}= of {cls.__name__} is now {names[former]}=", FutureWarning, stacklevel=2)
                given[names[former]] = given.pop(former)
            init(self, **given)

        setattr(cls, "__init__", renaming)  # noqa: B010 - mypy refuses to assign to __init__
        return cls

    return decorated


@_takes_former_names(normalisation="normalization", standardised="standardized")
@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Training samples, which the partition deals out, and the server's test samples.

    `class_names` is empty for a regression.  `normalization` is the customary one of this data, which the
    factory has *not* applied; as `Workload.dataset` gives it, it is the one that was applied.  Where it is customary
    to measure it, `standardized` says instead which channels get mean 0 and standard deviation 1 of the training samples.
    `validation` are samples that were held out of training for the choice of hyper-parameters; the workload makes them.
    `notes` are sentences that a reader of the run should know, such as what was cut; they are written into partition.json.
    `text` is the tokenizer where samples are blocks of tokens, and None for all other data.
    """

    train: AnySamples
    test: AnySamples
    class_names: tuple[str, ...]
    normalization: Normalization = IDENTITY
    standardized: tuple[bool, ...] = ()
    validation: AnySamples | None = None
    text: Tokenizer | None = None
    notes: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample's features."""
        return self.train.shape

    @property
    def num_outputs(self) -> int:
        """What a model has to put out per sample; per token, for text."""
        return self.text.vocabulary_size if self.text is not None else len(self.class_names) or 1


def normalized(dataset: Dataset, preset: Preset, constants: Normalization = IDENTITY) -> Dataset:
    """The data set with the features of all its samples normalized; see [Note: channels].

    Raises:
        DataError: there are not as many constants as channels.
    """
    match preset:
        case "default":
            normalization = dataset.normalization
            if dataset.standardized:
                normalization = _measured(dataset.train, "per_channel").only(dataset.standardized)
        case "none":
            normalization = IDENTITY
        case "per_channel" | "unit":
            normalization = _measured(dataset.train, preset)
        case "constants":
            normalization, num_channels = constants, dataset.input_shape[0]
            if len(constants.shift) != num_channels:
                raise DataError(
                    f"data.mean has {len(constants.shift)} numbers and a sample {num_channels} channels; expected is "
                    "one number for each."
                )
    return replace(
        dataset,
        train=dataset.train.normalized(normalization),
        test=dataset.test.normalized(normalization),
        validation=None if dataset.validation is None else dataset.validation.normalized(normalization),
        normalization=normalization,
    )


def _measured(train: AnySamples, preset: Literal["per_channel", "unit"]) -> Normalization:
    return measured(preset, (features for features, _ in train.batches(_MEASURED_BATCH)))


def features_of(item: Any) -> Tensor:
    """The features of one item of a torch Dataset as float32, an image as [channels, height, width].

    >>> features_of((np.array([0, 255], dtype=np.uint8), 1)).tolist()
    [0.0, 1.0]
    """
    found = item[0] if isinstance(item, tuple | list) else item
    if not isinstance(found, Tensor):
        values = np.array(found)
        if hasattr(found, "getbands"):  # a PIL image, whose array is [height, width] or [height, width, channels]
            values = np.atleast_3d(values).transpose(2, 0, 1)
        found = torch.from_numpy(np.ascontiguousarray(values))
    return found.float().div_(255) if found.dtype == torch.uint8 else found.float()
