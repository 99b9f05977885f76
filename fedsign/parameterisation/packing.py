"""What travels of a sparse model: of each sparse tensor the weights that there are, as one row.

A model computes with whole tensors, in which absent weights are 0.  Everything outside of it (requests, replies, means, servers' and
clients' memories, checkpoints, files that nodes keep) holds rows, in the order of the places in the tensor, and need not know: to it
the model is one with other shapes.  Both sides make the rows by masks that they derive from the seed, so that no places travel.
Dense tensors are as they are, and a model without a sparse one is packed by doing nothing.

The two meet where a model's tensors are taken or put in (`clients.working_model`), and where a file of weights is written.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fedsign.models.transform import Packing
from fedsign.parameterisation.masks import Mask, gathered, put_back
from fedsign.records import Tensors


class RowPacking(Packing):
    """Sends the weights of each sparse tensor as one row.

    Tensors whose shapes are neither those of the model nor those of its rows pass as they are, for others to judge.
    """

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        self._masks = masks
        self.masks = {name: mask.is_there for name, mask in masks.items()}

    def shape(self, name: str, whole: torch.Size) -> torch.Size:
        """See Packing."""
        return torch.Size([self._masks[name].num]) if name in self._masks else whole

    def packed(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """See Packing; rows are copies, all others the given tensors."""
        return {name: self._row(name, tensor) for name, tensor in tensors.items()}

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See Packing; a row becomes a whole tensor every time that it is asked for."""
        return _Whole(tensors, self._masks)

    def put(self, name: str, sent: Tensor, into: Tensor) -> None:
        """See Packing; for tensors that have a mask."""
        mask = self._masks[name]
        into.zero_()  # a client that diverged may have left NaN where no weight is
        put_back(into, sent.to(into.device, into.dtype), mask)

    def _row(self, name: str, tensor: Tensor) -> Tensor:
        mask = self._masks.get(name)
        if mask is None or tensor.shape[-mask.is_there.dim() :] != mask.is_there.shape:
            return tensor
        return gathered(tensor, mask)


class _Whole(Mapping[str, Tensor]):
    """See `RowPacking.whole`."""

    def __init__(self, tensors: Mapping[str, Tensor], masks: Mapping[str, Mask]) -> None:
        self._tensors, self._masks = tensors, masks

    def __getitem__(self, name: str) -> Tensor:
        tensor, mask = self._tensors[name], self._masks.get(name)
        if mask is None or tensor.shape != (mask.num,):
            return tensor
        whole = tensor.new_zeros(mask.is_there.shape)
        put_back(whole, tensor, mask)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def rows_of(model: nn.Module, masks: Mapping[str, Mask]) -> RowPacking:
    """The packing of a model; layers that share a sparse tensor share its mask."""
    of = {model.get_parameter(name): mask for name, mask in masks.items()}
    names = model.named_parameters(remove_duplicate=False)
    return RowPacking({name: of[parameter] for name, parameter in names if parameter in of})
