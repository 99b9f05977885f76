"""The types that a data set factory returns.

[Note: two kinds of samples] `Samples` holds features in memory.  `LazySamples` holds only the targets, and fetches the
features of a batch from a map-style torch Dataset, for data that do not fit into memory.  Training and evaluation use
only what both provide: `len`, `[index]` (a subset), `to(device)`, `batch(index)`, `batches(size)`, `shape`, `targets`
and `owners`.

[Note: start and end] Every tokenizer has a token before and a token after each document.  A model can thus predict a
document's first token, and learns where documents end.  In most tokenizers they are the same token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsign.data.items import features_of as features_of
from fedsign.data.normalize import IDENTITY, Normalization, Preset, measured
from fedsign.data.target import Target, described
from fedsign.errors import DataError
from fedsign.seeding import Purpose, global_stream
from fedsign.storage.checkpoints import tensors_digest
from fedsign.storage.digests import digest_of

IntArray = npt.NDArray[np.int64]
_CPU = torch.device("cpu")
_MEASURED_BATCH = 4096  # samples; measuring converts a batch to float64
_Class = TypeVar("_Class", bound=type)


class Source(Protocol):
    """A map-style torch Dataset: items are (features, target, ...) tuples, or features alone."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Features [n, ...] and targets [n, ...], in memory; `fedsign.data.contract` says as what they arrive.

    For text: tokens [n, T] (int64), or [n, T, 2] with their positions in packed documents, with the next tokens [n, T]
    as targets, -100 where a token is not scored.
    `owners` [n] assigns samples to natural clients; None if there are none.  A factory may give arrays or lists.
    `questions` [n] (any objects) holds what a metric may ask about a sample, or None.
    """

    features: Tensor
    targets: Tensor
    owners: Tensor | None = None
    questions: npt.NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: IntArray) -> "Samples":
        owners = None if self.owners is None else self.owners[index]
        questions = None if self.questions is None else self.questions[index]
        return Samples(features=self.features[index], targets=self.targets[index], owners=owners, questions=questions)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample's features."""
        return tuple(self.features.shape[1:])

    def to(self, device: torch.device) -> "Samples":
        """The samples on a device."""
        return replace(self, features=self.features.to(device), targets=self.targets.to(device))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Features and targets at these indices."""
        return self.features[index], self.targets[index]

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in order, in batches."""
        return zip(self.features.split(batch_size), self.targets.split(batch_size), strict=True)

    def normalized(self, normalization: Normalization) -> "Samples":
        """The samples with normalized features."""
        return replace(self, features=normalization.apply(self.features))


@dataclass(frozen=True, kw_only=True, slots=True)
class LazySamples:
    """Targets [n] in memory; features are fetched from `source`, one batch at a time.

    An item's features may be a tensor, an array or a PIL image; uint8 values are scaled to [0, 1], and integers are
    kept or become floats.  `positions` [n] selects items of `source`; None selects all, in order.
    """

    source: Source
    targets: Tensor
    owners: Tensor | None = None
    positions: Tensor | None = None
    normalization: Normalization = IDENTITY
    device: torch.device = _CPU
    keeps_integers: bool = True

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: IntArray) -> "LazySamples":
        chosen = torch.from_numpy(index)
        return replace(
            self,
            targets=self.targets[chosen],
            owners=None if self.owners is None else self.owners[chosen],
            positions=self._positions(chosen),  # into `source`, also for a subset of a subset
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample's features; fetches the first sample."""
        with global_stream(0, Purpose.DATA):  # an item may draw
            return tuple(self.batch(torch.tensor([0]))[0].shape[1:])

    @property
    def features(self) -> Tensor:
        """All features at once, [n, ...]; only for subsets that fit into memory."""
        return self.batch(torch.arange(len(self)))[0]

    def to(self, device: torch.device) -> "LazySamples":
        """The samples, with batches on a device."""
        return replace(self, device=device, targets=self.targets.to(device))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Features and targets at these indices; fetches the features.

        Raises:
            DataError: the features differ in shape.
        """
        # Python integers: a map-style Dataset need not accept tensors as indices
        items = [features_of(self.source[position]) for position in self._positions(index).tolist()]
        shapes = {tuple(item.shape) for item in items}
        if len(shapes) > 1:
            first, second = sorted(shapes)[:2]
            raise DataError(
                f"samples have features of the shapes {list(first)} and {list(second)}; expected one shape for all: "
                "let the data set crop or resize them."
            )
        features = torch.stack(items)
        if not self.keeps_integers:
            features = features.float()
        return self.normalization.apply(features).to(self.device), self.targets[index]

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in order, in batches."""
        return map(self.batch, torch.arange(len(self)).split(batch_size))

    def normalized(self, normalization: Normalization) -> "LazySamples":
        """The samples, with normalization of each batch."""
        return replace(self, normalization=self.normalization.then(normalization))

    def _positions(self, index: Tensor) -> Tensor:
        return index if self.positions is None else self.positions[index]


AnySamples = Samples | LazySamples


def joined_questions(parts: Sequence[Samples]) -> npt.NDArray[np.object_] | None:
    """The questions of all parts, None for a sample of a part without; None if no part has any."""
    if all(part.questions is None for part in parts):
        return None
    return np.concatenate([np.full(len(part), None) if part.questions is None else part.questions for part in parts])


class Tokenizer(Protocol):
    """Converts texts to tokens, integers from 0 to `vocabulary_size` - 1, and back."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def start_id(self) -> int:
        """The token before a document; see [Note: start and end]."""
        ...

    @property
    def end_id(self) -> int:
        """The token after a document; see [Note: start and end]."""
        ...

    @property
    def pad_id(self) -> int:
        """The token that pads blocks; padding is never scored."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


def fingerprint(read: object) -> str:
    """Identifies what was read from files, such as a tokenizer; empty for what the configuration determines."""
    found = getattr(read, "fingerprint", "")
    return found if isinstance(found, str) else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What a reader's settings alone determine of its samples, so that separate sites fit one model.

    `remedy` tells how to configure the shape.
    """

    input_shape: tuple[int, ...] = ()  # empty: unknown
    class_names: tuple[str, ...] = ()
    text: Tokenizer | None = None
    is_standardized: bool = False  # by default, with statistics measured on the data
    remedy: str = "say it, such as --set 'partition.input_shape=[1, 28, 28]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Training samples, to be partitioned, and the server's test samples.

    `class_names` is empty for a regression.  `normalization` is the usual one for this data: the factory does *not*
    apply it, but `Workload.dataset` does.  If it is usually measured, `standardized` instead says which channels are
    scaled to mean 0 and standard deviation 1 over the training samples.  `validation` holds samples held out for
    choosing hyperparameters; the workload creates it.  `feature_names` holds the column of each feature of a table, and
    `feature_texts` the text that a one-hot feature stands for, None for a number.  `text` is the tokenizer if samples
    are blocks of tokens, else None.

    Sentences for readers of a run are stored in partition.json: `read_as` informs how the data were read, such as with
    which delimiter, and `notes` warn, such as of what was truncated.
    """

    train: AnySamples
    test: AnySamples
    class_names: tuple[str, ...]
    normalization: Normalization = IDENTITY
    standardized: tuple[bool, ...] = ()
    validation: AnySamples | None = None
    text: Tokenizer | None = None
    feature_names: tuple[str, ...] = ()
    feature_texts: tuple[str | None, ...] = ()
    read_as: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def digest(self) -> str:
        """A digest of all samples and the names of the classes.

        Of features that are fetched, only the positions, and the source's attribute `fingerprint` if it has one.
        """
        tensors: dict[str, Tensor | None] = {}
        sources = [fingerprint(getattr(samples, "source", None)) for samples in (self.train, self.test)]
        for name, samples in {"train": self.train, "test": self.test, "validation": self.validation}.items():
            if samples is not None:
                features = samples.positions if isinstance(samples, LazySamples) else samples.features
                own = {"features": features, "targets": samples.targets, "owners": samples.owners}
                tensors |= {f"{name} {key}": tensor for key, tensor in own.items()}
        found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        texts = [*self.class_names, *filter(None, sources)]
        return digest_of("\0".join(texts).encode(), tensors_digest(found).encode())

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample's features."""
        return self.train.shape

    @property
    def target(self) -> Target:
        """What a model learns to predict."""
        vocabulary_size = None if self.text is None else self.text.vocabulary_size
        return described(self.train.targets, self.class_names, vocabulary_size)

    @property
    def num_outputs(self) -> int:
        """Number of model outputs per sample; for text, per token."""
        return self.target.num_outputs


def normalized(dataset: Dataset, preset: Preset, constants: Normalization = IDENTITY) -> Dataset:
    """The data set with all features normalized; see [Note: channels].

    Raises:
        DataError: the number of constants is not that of the channels.
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
                    f"data.mean has {len(constants.shift)} numbers and a sample {num_channels} channels; expected "
                    "one number for each."
                )
    changed = with_samples(dataset, lambda samples: samples.normalized(normalization))
    return replace(changed, normalization=normalization)


def with_samples(dataset: Dataset, change: Callable[[AnySamples], AnySamples]) -> Dataset:
    """The data set with changed samples for training, test, and validation."""
    held = None if dataset.validation is None else change(dataset.validation)
    return replace(dataset, train=change(dataset.train), test=change(dataset.test), validation=held)


def _measured(train: AnySamples, preset: Literal["per_channel", "unit"]) -> Normalization:
    return measured(preset, (features for features, _ in train.batches(_MEASURED_BATCH)))
