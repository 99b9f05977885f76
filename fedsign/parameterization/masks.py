"""Masks of sparse tensors: which weights are present.

A mask is drawn from (seed, MASKS, tensor name), so server and clients draw the same mask and never send it.  Each
weight draws u, uniform in [0, 1).  In a tensor of N weights with density rho, the present weights are

    bernoulli   those with u < rho, independently, as in the code of Dey et al. 2024 (arXiv 2405.15743)
    exact       the round(rho N) with the smallest u: a uniformly random subset of fixed size

Both use the same u, so `exact` adds or removes as few weights as possible relative to `bernoulli`, and masks are
nested: a lower density selects a subset of a higher one.  `exact` uses 32 bits of u (`bernoulli` 24) and breaks ties by
position.  It relies only on bits that NumPy guarantees.  If two versions drew different masks, the number of weights
would still match, and nobody would notice.

A tensor keeps at least one weight, that with the smallest u, so that masks stay nested and those of stored runs do not
change.  An empty tensor would cut the network in two for ever ("layer collapse", Tanaka et al. 2020, arXiv 2006.05467,
which demands one weight per layer); Dey et al. do not say what happens at such densities.

Absent weights start at 0 and stay 0: their gradients are 0, and no optimizer here, weight decay, or penalty relative to
the received model moves a zero weight with a zero gradient.  Rules that change masks during training
(`fedsign.parameterization.sparsity`) are limited to a single client and round.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsign.parameterization.section import MaskDraw
from fedsign.seeding import Purpose, named_generator, named_words


class Mask:
    """The mask of one tensor; `is_present` has the tensor's shape."""

    def __init__(self, is_present: Tensor) -> None:
        self.is_present = is_present
        self.dense_gradient: Tensor | None = None  # gradient of all weights, if kept
        self.keeps_gradient = False

    @cached_property
    def num(self) -> int:
        """The number of present weights."""
        return int(self.is_present.sum())

    @cached_property
    def indices(self) -> Tensor:
        """Sorted flat indices of the present weights, [num]; int32 if that suffices."""
        indices = self.is_present.flatten().nonzero().squeeze(1)
        return indices.int() if self.is_present.numel() <= torch.iinfo(torch.int32).max else indices

    @cached_property
    def columns(self) -> "Columns":
        """Indices of a matrix and its transpose in compressed-row (CSR) form; 12 bytes per weight."""
        rows, columns = self.is_present.nonzero(as_tuple=True)
        turned = columns.argsort(stable=True)
        return Columns(
            shape=tuple(self.is_present.shape),
            indices=self.indices,
            starts=_starts(rows, self.is_present.shape[0]),
            columns=columns.int(),
            turned=turned.int(),
            turned_starts=_starts(columns[turned], self.is_present.shape[1]),
            turned_columns=rows[turned].int(),
        )

    def part(self, start: int, stop: int, device: torch.device) -> "Mask":
        """The mask of a slice of the flattened tensor."""
        # a view would keep the whole mask alive
        return Mask(self.is_present.reshape(-1)[start:stop].to(device, copy=True))

    def become(self, is_present: Tensor) -> None:
        """Change the mask and drop the cached indices."""
        self.is_present = is_present
        for name in ("num", "indices", "columns"):
            # where cached_property stores its value
            vars(self).pop(name, None)

    def keep_gradient(self, keeps: bool) -> None:
        """Start accumulating dense gradients, or stop; either way, discard what was accumulated."""
        self.keeps_gradient, self.dense_gradient = keeps, None

    def __call__(self, gradient: Tensor) -> Tensor:
        """A gradient hook: zero the gradient of absent weights."""
        if self.keeps_gradient:
            before = self.dense_gradient
            # a new sum: the first one is autograd's own tensor
            self.dense_gradient = gradient.detach() if before is None else before + gradient.detach()
        # out of place: autograd forbids hooks to change their argument
        return gradient * self.is_present


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """CSR indices of a matrix [out, in] and of its transpose ("turned")."""

    shape: tuple[int, ...]
    indices: Tensor  # [num], flat indices
    starts: Tensor  # [out + 1]
    columns: Tensor  # [num]
    turned: Tensor  # [num], permutation into the transpose's order
    turned_starts: Tensor  # [in + 1]
    turned_columns: Tensor  # [num]

    def rows(self, values: Tensor) -> Tensor:
        """The matrix with these weights, as CSR."""
        return _compressed(self.starts, self.columns, values, self.shape)

    def turned_rows(self, values: Tensor) -> Tensor:
        """Its transpose, as CSR."""
        return _compressed(self.turned_starts, self.turned_columns, values[self.turned], self.shape[::-1])


def _starts(ascending: Tensor, num: int) -> Tensor:
    """Row pointers: the position at which each of `num` row numbers starts in a sorted list, and the end."""
    # an empty row starts where the next one does
    return torch.searchsorted(ascending, torch.arange(num + 1), out_int32=True)


def _compressed(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        # the indices are derived from a mask; checking them in every product would cost a pass over them
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


def mask_of(seed: int, name: str, shape: tuple[int, ...], density: float, *, draw: MaskDraw = "bernoulli") -> Mask:
    """Draw the mask of a tensor; the same in every process.

    >>> mask_of(0, "up.weight", (64, 64), 0.25).num, mask_of(0, "up.weight", (64, 64), 0.25, draw="exact").num
    (1030, 1024)
    """
    if draw == "bernoulli":
        uniform = named_generator(seed, Purpose.MASKS, name).random(shape, dtype=np.float32)
        is_present = uniform < density
        if density > 0 and not is_present.any():
            is_present.flat[uniform.argmin()] = True
    else:
        drawn = named_words(seed, Purpose.MASKS, name, num=prod(shape))
        is_present = _smallest(drawn, max(round(density * drawn.size), int(density > 0))).reshape(shape)
    return Mask(torch.from_numpy(is_present))


def _smallest(drawn: NDArray[np.uint32], num: int) -> NDArray[np.bool_]:
    """Mark the `num` smallest entries; ties go to the earlier ones.

    >>> _smallest(np.array([5, 2, 7, 5], dtype=np.uint32), 2).tolist()
    [True, True, False, False]
    """
    if num == 0:
        return np.zeros(drawn.shape, dtype=np.bool_)
    # linear in N, unlike a sort
    limit = np.partition(drawn, num - 1)[num - 1]
    mask: NDArray[np.bool_] = drawn < limit
    mask[np.flatnonzero(drawn == limit)[: num - np.count_nonzero(mask)]] = True
    return mask


def hold(model: nn.Module, masks: Mapping[str, Mask]) -> None:
    """Zero a model's absent weights, and their gradients from now on."""
    for name, mask in masks.items():
        parameter = model.get_parameter(name)
        with torch.no_grad():
            parameter.mul_(mask.is_present)
        # runs before the gradient is accumulated, so clipping and every optimizer see the masked one
        parameter.register_hook(mask)


def gathered(tensor: Tensor, mask: Mask) -> Tensor:
    """Copy the present weights into a row [num], or [K, num] for a cohort [K, ...]."""
    stacked = tensor.shape[: tensor.dim() - mask.is_present.dim()]
    # cached on the mask's device, which need not be the tensor's
    return tensor.reshape(*stacked, -1).index_select(-1, mask.indices.to(tensor.device))


def put_back(whole: Tensor, row: Tensor, mask: Mask) -> None:
    """Write a row [num] back to its positions in a tensor, in place; the rest does not change."""
    if whole.is_contiguous():
        whole.view(-1)[mask.indices.to(whole.device)] = row
    else:
        # goes by logical position, where a channels-last tensor has no flat view
        whole.masked_scatter_(mask.is_present.to(whole.device), row)
