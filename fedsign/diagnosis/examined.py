"""The data of an experiment, as the rules of `fedsign.diagnosis.data` read them; each fact is measured on first use.

[Note: bounds] Exact duplicates are counted among all samples in memory.  Statistics of features come from at most
`_MOST_VALUES` numbers, of evenly spaced samples.  `LazySamples` are fetched for `num_fetched` evenly spaced samples.
Of a large lazy population, the counted clients are examined (fedsign.data.partition.lazy).

[Note: pixels] Samples [C, ...] are images, whose features are pixels; C are channels.  A row of a table [F] is taken
for a flat image if F is a square (or three), and most features share one minimum and reach a similar maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsign.config import ExperimentConfig
from fedsign.data.base import AnySamples, Dataset, IntArray, Samples
from fedsign.data.partition.lazy import counted_clients
from fedsign.data.target import Target, TargetKind
from fedsign.workload import Workload

_MOST_VALUES = 2**20
_FEWEST_PIXELS = 64
_GRAY = 1e-3  # channels of a gray pixel differ by less: half of 1/255, and rounding
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Statistics [F] of features, or [C] of the channels of images, as the model receives them."""

    low: Floats
    high: Floats
    rms: Floats  # root mean square

    @property
    def size(self) -> Floats:
        """The largest absolute value of each."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


@dataclass(frozen=True)
class Examined:
    """The data of a workload whose training samples are in this process."""

    workload: Workload
    num_fetched: int = 32

    @property
    def config(self) -> ExperimentConfig:
        """The experiment."""
        return self.workload.config

    @property
    def dataset(self) -> Dataset:
        """The data set, with normalized features."""
        return self.workload.dataset

    @property
    def is_at_site(self) -> bool:
        """Whether only some sites' data are here, which need not resemble the data of all."""
        return self.workload.sites_here is not None

    @cached_property
    def fetched(self) -> tuple[Samples | None, Samples | None, str]:
        """Training and test samples in memory; None and an error if one cannot be fetched."""
        try:
            return self._at_hand(self.dataset.train), self._at_hand(self.dataset.test), ""
        except Exception as error:  # noqa: BLE001 - of any type: it comes from the user's data set
            return None, None, f"{type(error).__name__}: {error}".rstrip(".")

    def _at_hand(self, samples: AnySamples) -> Samples:
        if isinstance(samples, Samples):
            return samples
        chosen = samples[_evenly(len(samples), self.num_fetched)]
        return Samples(features=chosen.features, targets=chosen.targets)

    # -- classes ------------------------------------------------------------------------------------------------------

    @cached_property
    def target(self) -> Target:
        """What a model learns to predict."""
        return self.dataset.target

    @property
    def has_classes(self) -> bool:
        """Whether targets are class labels."""
        return bool(self.target.class_names)

    @property
    def has_real_targets(self) -> bool:
        """Whether targets are real numbers, one per sample."""
        return self.target.kind is TargetKind.NUMBER

    @cached_property
    def class_counts(self) -> tuple[IntArray, IntArray]:
        """Training and test samples of each class; those held out for validation count as training samples."""
        data, num_classes = self.dataset, len(self.dataset.class_names)
        train, test, held = (
            np.zeros(num_classes, np.int64)
            if part is None
            else np.bincount(part.targets.numpy(), minlength=num_classes)
            for part in (data.train, data.test, data.validation)
        )
        return train + held, test

    # -- features -----------------------------------------------------------------------------------------------------

    @cached_property
    def sample(self) -> Tensor:
        """Features of some training samples [n, ...]; none for text, or if they cannot be fetched."""
        train = self.fetched[0]
        if train is None or self.dataset.text is not None:
            return torch.zeros(0, 1)
        num_values = max(1, train.features[0].numel())
        chosen = train.features[torch.from_numpy(_evenly(len(train), max(64, min(4096, _MOST_VALUES // num_values))))]
        return chosen if chosen.ndim > 1 else chosen[:, None]

    @cached_property
    def columns(self) -> Columns | None:
        """Statistics of the features or channels; None for text."""
        if self.sample.ndim < 2 or not self.sample.numel():
            return None
        values = self.sample.transpose(0, 1).flatten(1)  # [F or C, n * ...]
        low, high = values.aminmax(dim=1)
        # accumulated in float64: squares of float32 may overflow
        rms = values.double().square().mean(dim=1).sqrt()
        return Columns(low=low.double().numpy(), high=high.double().numpy(), rms=rms.numpy())

    @cached_property
    def has_pixels(self) -> bool:
        """Whether features are pixels; see [Note: pixels]."""
        columns, num_columns = self.columns, self.sample.shape[1]
        if self.sample.ndim > 2 or columns is None:
            return True
        if any(text is not None for text in self.dataset.feature_texts):
            return False
        if num_columns < _FEWEST_PIXELS or not (_is_square(num_columns) or _is_square(num_columns / 3)):
            return False
        shift, scale = self.normalization
        low, high = columns.low * scale + shift, columns.high * scale + shift
        span = high - low.min()
        return bool(np.median(low) - low.min() <= span.max() / 100 and np.median(span) >= span.max() / 4)

    @property
    def normalization(self) -> tuple[Floats, Floats]:
        """What undoes the normalization: shift and scale of each channel."""
        applied = self.dataset.normalization
        return np.array(applied.shift or 0.0), np.array(applied.scale or 1.0)

    @cached_property
    def varying(self) -> IntArray:
        """Features or channels that are not constant in the sample."""
        columns = self.columns
        return np.flatnonzero([]) if columns is None else np.flatnonzero(columns.high > columns.low)

    @cached_property
    def constant(self) -> IntArray:
        """Features of a table with one value in all training samples, or in none of the levels of a text column."""
        train, columns = self.fetched[0], self.columns
        if train is None or columns is None or self.has_pixels:
            return np.array([], np.int64)
        candidates = np.flatnonzero(columns.high == columns.low)
        values = train.features[:, torch.from_numpy(candidates)]
        found = candidates[(values == values[:1]).all(dim=0).numpy()]
        names = self.dataset.feature_names
        # one of several levels without samples is no mistake: they may be agreed on, or occur among the held out
        return np.array([j for j in found if not names or names.count(names[j]) == 1], np.int64)

    @cached_property
    def repeated(self) -> dict[int, int]:
        """Features of a table that equal an earlier one in all training samples, with that one."""
        train = self.fetched[0]
        if train is None or self.has_pixels:
            return {}
        found: dict[int, int] = {}
        first: dict[int, int] = {}
        for column, key in zip(self.varying.tolist(), _keys(self.sample.T[self.varying].contiguous()), strict=True):
            earlier = first.setdefault(key, column)
            if earlier != column and torch.equal(train.features[:, earlier], train.features[:, column]):
                found[column] = earlier
        names = self.dataset.feature_names
        # a text column repeats another only if all of its levels do
        whole = [j for j in found if not names or all(k in found for k, name in enumerate(names) if name == names[j])]
        return {column: found[column] for column in whole}

    def named(self, columns: Sequence[int]) -> str:
        """Features in words."""
        names = self.dataset.feature_names
        shown = list(dict.fromkeys(f"'{names[j]}'" if names else str(j) for j in columns))
        word = "channel" if self.has_pixels else "column" if names else "feature"
        more = f" and {len(shown) - 3} more" if len(shown) > 4 else ""
        return f"{word}{'s' if len(shown) > 1 else ''} {', '.join(shown[: 3 if more else 4])}{more}"

    @cached_property
    def gray(self) -> tuple[int, int]:
        """How many images of the sample are gray, and how many images of three channels were examined."""
        if self.sample.ndim != 4 or self.sample.shape[1] != 3:
            return 0, 0
        shift, scale = (torch.from_numpy(np.broadcast_to(each, 3).astype(np.float32)) for each in self.normalization)
        images = self.sample * scale[:, None, None] + shift[:, None, None]
        spread = (images.amax(dim=1) - images.amin(dim=1)).flatten(1).amax(dim=1)
        return int((spread < _GRAY * max(1.0, float(images.max()))).sum()), len(images)

    @cached_property
    def blank(self) -> tuple[int, int]:
        """How many training images have one value in all pixels of each channel, and how many were examined."""
        train = self.fetched[0]
        if train is None or train.features.ndim != 4 or train.features[0, 0].numel() < 2:
            return 0, 0
        low, high = train.features.flatten(2).aminmax(dim=2)
        return int((low == high).all(dim=1).sum()), len(train)

    # -- duplicates ---------------------------------------------------------------------------------------------------

    @cached_property
    def keys(self) -> tuple[IntArray, IntArray]:
        """A key of each training and test sample; samples with equal features have equal keys."""
        train, test, _ = self.fetched
        if train is None or test is None:
            return np.array([], np.int64), np.array([], np.int64)
        return _keys(train.features), _keys(test.features)

    @property
    def num_duplicates(self) -> int:
        """Training samples whose features equal those of an earlier one."""
        return len(self.keys[0]) - len(np.unique(self.keys[0]))

    @property
    def num_shared(self) -> int:
        """Test samples whose features equal those of a training sample."""
        return int(np.isin(self.keys[1], self.keys[0]).sum())

    @cached_property
    def has_few_values(self) -> bool:
        """Whether equal samples are to be expected, as in a table of categories.

        If features were independent, a pair of samples would be equal with the product of the features' probabilities
        of being equal, sum_v p_v^2; "expected" means n^2 / 2 such pairs are at least n / 1000.
        """
        values = self.sample[:1024].flatten(1)
        shares = [
            values[:, column].unique(return_counts=True)[1].double() / len(values) for column in range(values.shape[1])
        ]
        chance = float(np.prod([float(share.square().sum()) for share in shares]))
        return len(self.keys[0]) * chance >= 0.002

    # -- clients ------------------------------------------------------------------------------------------------------

    @cached_property
    def client_sizes(self) -> IntArray:
        """Samples of each counted client."""
        return np.array([len(share) for share in self._shares])

    @property
    def num_single_class(self) -> int:
        """Counted clients with samples of one class."""
        labels = self.dataset.train.targets.numpy()[np.concatenate(self._shares)]
        starts = np.cumsum(self.client_sizes) - self.client_sizes
        return int((np.minimum.reduceat(labels, starts) == np.maximum.reduceat(labels, starts)).sum())

    @property
    def _shares(self) -> list[IntArray]:
        return [self.workload.partition[client] for client in counted_clients(self.workload.partition)]


def _evenly(num: int, most: int) -> IntArray:
    """At most `most` evenly spaced positions below `num`."""
    return np.linspace(0, num - 1, min(num, most)).astype(np.int64)


def _is_square(number: float) -> bool:
    return number == isqrt(int(number)) ** 2


def _keys(rows: Tensor) -> IntArray:
    """A 64-bit key of each row of a contiguous tensor [n, ...]: two random sums of its bits.

    The sums are exact in float64 and therefore independent of their order: each has 2 F or 4 F products of 15 and
    `bits` bits.
    """
    bits = rows.flatten(1).view(torch.int16)  # there may be no rows
    largest = 2 ** max(1, 53 - 15 - bits.shape[1].bit_length())
    weights = torch.from_numpy(
        np.random.default_rng(0).integers(1, largest, size=(bits.shape[1], 2)).astype(np.float64)
    )
    size = max(1, 2**18 // bits.shape[1])
    buffer = torch.empty(size, bits.shape[1], dtype=torch.float64)  # reused: a new one per chunk costs page faults
    sums = torch.cat([buffer[: len(chunk)].copy_(chunk) @ weights for chunk in bits.split(size)]).long()
    mixed: IntArray = (sums[:, 0] * 0x9E3779B97F4A7C1 + sums[:, 1]).numpy()
    return mixed
