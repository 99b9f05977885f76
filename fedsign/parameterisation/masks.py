"""Which weights of a sparse tensor there are.

Drawn once from (seed, MASKS, the tensor's name): server and clients draw the same, and nobody sends it.  Each weight draws a number
u, uniform in [0, 1), and of a tensor of N weights and density rho there are

    bernoulli   those with u < rho: each with probability rho, independently, as in the code of Dey et al. 2024 (arXiv 2405.15743)
    exact       the round(rho N) with the smallest u: each set of so many is equally likely, and their number is no chance

Both look at the same numbers, so that `exact` is `bernoulli` with the fewest weights added or taken away, and under either the weights
at a lower density are some of those at a higher one.  `exact` looks at 32 bits of them (`bernoulli` at 24); of equal ones the earlier in the tensor
count.  Its bits are those that NumPy guarantees: two versions that drew other masks would draw as many weights, and nobody would notice.

Where a rule changes a mask later (`fedsign.parameterisation.sparsity`), training is in one place.
The other weights start at 0 and stay there, since their gradients are 0: no optimizer of ours,
no weight decay and no penalty that compares with the received model moves a weight that is 0 there and gets no gradient.
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

from fedsign.parameterisation.section import MaskDraw
from fedsign.seeding import Purpose, named_generator, named_words


class Mask:
    """Of one tensor; `is_there` has its shape."""

    def __init__(self, is_there: Tensor) -> None:
        self.is_there = is_there
        self.dense_gradient: Tensor | None = None  # of all weights, while it is kept
        self.keeps_gradient = False

    @cached_property
    def num(self) -> int:
        """How many weights there are."""
        return int(self.is_there.sum())

    @cached_property
    def places(self) -> Tensor:
        """Where they are in the tensor as one row, ascending [num]; 4 bytes each, if that is enough."""
        places = self.is_there.flatten().nonzero().squeeze(1)
        return places.int() if self.is_there.numel() <= torch.iinfo(torch.int32).max else places

    @cached_property
    def columns(self) -> "Columns":
        """Where they are in a matrix, for products of compressed rows; 12 bytes each."""
        rows, columns = self.is_there.nonzero(as_tuple=True)
        turned = columns.argsort(stable=True)
        return Columns(
            shape=tuple(self.is_there.shape),
            places=self.places,
            starts=_starts(rows, self.is_there.shape[0]),
            columns=columns.int(),
            turned=turned.int(),
            turned_starts=_starts(columns[turned], self.is_there.shape[1]),
            turned_columns=rows[turned].int(),
        )

    def part(self, start: int, stop: int, device: torch.device) -> "Mask":
        """The mask of a piece of the flat tensor."""
        return Mask(self.is_there.reshape(-1)[start:stop].to(device, copy=True))

    def become(self, is_there: Tensor) -> None:
        """Other weights are there from now on."""
        self.is_there = is_there
        for name in ("num", "places", "columns"):
            vars(self).pop(name, None)

    def keep_gradient(self, keeps: bool) -> None:
        """Keep the next gradients of all weights, added up until this is called again, or forget them."""
        self.keeps_gradient, self.dense_gradient = keeps, None

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient of the weights that there are, 0 elsewhere: a hook for a parameter."""
        if self.keeps_gradient:
            before = self.dense_gradient
            self.dense_gradient = gradient.detach() if before is None else before + gradient.detach()
        return gradient * self.is_there


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Where the weights of a matrix [out, in] are, row by row and column by column, as compressed rows take it."""

    shape: tuple[int, ...]
    places: Tensor  # [num], in the matrix as one row
    starts: Tensor  # [out + 1]
    columns: Tensor  # [num]
    turned: Tensor  # [num]: the order of the transpose's weights
    turned_starts: Tensor  # [in + 1]
    turned_columns: Tensor  # [num]

    def rows(self, values: Tensor) -> Tensor:
        """The matrix with these weights."""
        return _compressed(self.starts, self.columns, values, self.shape)

    def turned_rows(self, values: Tensor) -> Tensor:
        """Its transpose."""
        return _compressed(self.turned_starts, self.turned_columns, values[self.turned], self.shape[::-1])


def _starts(ascending: Tensor, num: int) -> Tensor:
    """Where each of `num` numbers begins in a row of them, and its end."""
    return torch.searchsorted(ascending, torch.arange(num + 1), out_int32=True)


def _compressed(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


def mask_of(seed: int, name: str, shape: tuple[int, ...], density: float, *, draw: MaskDraw = "bernoulli") -> Mask:
    """The mask of a tensor, the same in every process.

    >>> mask_of(0, "up.weight", (64, 64), 0.25).num, mask_of(0, "up.weight", (64, 64), 0.25, draw="exact").num
    (1030, 1024)
    """
    if draw == "bernoulli":
        is_there = named_generator(seed, Purpose.MASKS, name).random(shape, dtype=np.float32) < density
    else:
        drawn = named_words(seed, Purpose.MASKS, name, num=prod(shape))
        is_there = _smallest(drawn, round(density * drawn.size)).reshape(shape)
    return Mask(torch.from_numpy(is_there))


def _smallest(drawn: NDArray[np.uint32], num: int) -> NDArray[np.bool_]:
    """Which `num` entries of a row are the smallest; of equal ones the earlier count.

    >>> _smallest(np.array([5, 2, 7, 5], dtype=np.uint32), 2).tolist()
    [True, True, False, False]
    """
    if num == 0:
        return np.zeros(drawn.shape, dtype=np.bool_)
    limit = np.partition(drawn, num - 1)[num - 1]
    found: NDArray[np.bool_] = drawn < limit
    found[np.flatnonzero(drawn == limit)[: num - np.count_nonzero(found)]] = True
    return found


def hold(model: nn.Module, masks: Mapping[str, Mask]) -> None:
    """Put a model's absent weights to 0 and keep their gradients there."""
    for name, mask in masks.items():
        parameter = model.get_parameter(name)
        with torch.no_grad():
            parameter.mul_(mask.is_there)
        parameter.register_hook(mask)


def gathered(tensor: Tensor, mask: Mask) -> Tensor:
    """The weights that there are as a row [num], or [K, num] of a stack [K, ...]; a copy."""
    stacked = tensor.shape[: tensor.dim() - mask.is_there.dim()]
    return tensor.reshape(*stacked, -1).index_select(-1, mask.places.to(tensor.device))


def put_back(whole: Tensor, row: Tensor, mask: Mask) -> None:
    """Write a row [num] to its places in a tensor; the rest stays."""
    if whole.is_contiguous():
        whole.view(-1)[mask.places.to(whole.device)] = row
    else:
        whole.masked_scatter_(mask.is_there.to(whole.device), row)
