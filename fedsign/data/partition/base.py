"""The result type of partitioners, and helpers that they share."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedsign.data.base import AnySamples, IntArray
from fedsign.data.partition.lazy import LazyShares, counted_clients
from fedsign.data.target import TargetKind, kind_of
from fedsign.errors import DataError

Concentration = Annotated[float, Field(gt=0, le=1e12)]  # of a Dirichlet distribution; larger sums overflow
AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """One array of sample indices per client, and its deviation from the draw.

    `num_moved` samples were moved between clients to reach the minimum per client.  `moved_label_distance` is the
    `label_distance` between the histograms before and after; None if labels were not part of the draw.  `is_shared`: a
    sample may belong to several clients, but only once to each.
    """

    indices: Sequence[IntArray]
    num_moved: int = 0
    moved_label_distance: float | None = 0.0
    is_shared: bool = False

    @property
    def largest(self) -> int:
        """The size of the largest client; an upper bound if shares are lazy."""
        return self.indices.largest if isinstance(self.indices, LazyShares) else max(map(len, self.indices))

    def digest(self) -> str:
        """A digest of the counted clients' indices."""
        found = hashlib.sha256()
        for client in counted_clients(self.indices):
            index = np.ascontiguousarray(self.indices[client], dtype="<i8")
            found.update(len(index).to_bytes(8, "little") + index.tobytes())
        return found.hexdigest()

    def moved_sentence(self, name: str) -> str:
        """A sentence about moved samples, for readers of a run."""
        total = sum(map(len, self.indices))
        sentence = (
            f"no draw of the {name} partition gave every client its minimum: {self.num_moved:,} of {total:,} samples "
            "were moved to the smallest clients from the largest"
        )
        if self.moved_label_distance is None:
            return sentence + "."
        return sentence + (
            f"; the clients' label histograms, drawn and dealt, differ by {self.moved_label_distance:.4f} on average "
            "(total variation)."
        )


def split_of(given: object, *, name: str) -> Split:
    """A factory's result as a `Split`; a user's own may be a plain sequence of indices per client.

    Raises:
        DataError: the result is neither, or its parts are not lists of integers.
    """
    if isinstance(given, Split):
        return given
    expected = "expected one one-dimensional array of integer indices for each client."
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str | bytes):
        raise DataError(f"partition.name={name} gives a {type(given).__name__}; {expected}")
    return Split(
        indices=[_integers(part, f"partition.name={name} gives client {k}", expected) for k, part in enumerate(given)]
    )


def _integers(part: object, prefix: str, expected: str) -> IntArray:
    try:
        index = np.asarray(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{prefix} a {type(part).__name__} that is no array ({error}); {expected}") from error
    if index.ndim != 1 or (len(index) and index.dtype.kind not in "iu"):
        raise DataError(f"{prefix} {index.dtype} values of shape {index.shape}; {expected}")
    return index.astype(np.int64)


def label_distance(first_counts: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """Mean over clients of the total variation between two label histograms, both [K, C]; in [0, 1].

    With class shares p and q it is sum_c |p_c - q_c| / 2: the fraction of a client's samples whose label would have to
    change.  An empty histogram has distance 1 from any other.

    >>> label_distance([[2, 2], [0, 0]], [[4, 0], [1, 0]])
    0.75
    """
    first, second = np.asarray(first_counts, dtype=np.float64), np.asarray(other, dtype=np.float64)
    first_sizes, second_sizes = first.sum(axis=1), second.sum(axis=1)
    # an empty histogram stays 0 instead of 0 / 0; its distance is set below
    p = first / np.maximum(first_sizes, 1)[:, None]
    q = second / np.maximum(second_sizes, 1)[:, None]
    distances = np.abs(p - q).sum(axis=1) / 2
    distances[(first_sizes == 0) != (second_sizes == 0)] = 1.0
    return float(distances.mean())


def group(owner_of: IntArray, num_clients: int) -> list[IntArray]:
    """Ascending sample indices per client, from the owner of each sample.

    >>> [part.tolist() for part in group(np.array([1, 0, 1]), 2)]
    [[1], [0, 2]]
    """
    order = np.argsort(owner_of, kind="stable")  # stable: ascending within each client
    # minlength: clients at the end may hold nothing
    return np.split(order, np.cumsum(np.bincount(owner_of, minlength=num_clients))[:-1])


def class_labels(train: AnySamples, *, name: str, instead: str = "partition.name=iid, quantity or natural") -> IntArray:
    """The class of each sample.

    Raises:
        DataError: the targets are real numbers, or there are several per sample.
    """
    if kind_of(train.targets) is not TargetKind.CLASS:
        given = f"of shape {list(train.targets.shape[1:])} each" if train.targets.ndim != 1 else "real numbers"
        raise DataError(f"partition.name={name} needs class labels, but the targets are {given}; use {instead}.")
    labels: IntArray = train.targets.numpy()
    return labels


def need(num_samples: int, *, num_clients: int, each: int, setting: str) -> None:
    """Raise DataError if there are fewer than `each` samples (or shards) per client."""
    if num_clients * each > num_samples:
        raise DataError(
            f"partition.num_clients={num_clients} clients with partition.{setting}={each} each need "
            f"{num_clients * each} training samples, but there are {num_samples}; lower the one or the other"
            f"{f', such as --set partition.num_clients={most}' if (most := num_samples // each) else ''}."
        )
