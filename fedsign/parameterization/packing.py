"""How a sparse model is sent: only the present weights of each sparse tensor, as one row.

The model itself computes with whole tensors, in which absent weights are 0.  Everything else (requests, replies, means,
server and client state, checkpoints) holds rows in the order of the tensor and sees a model with other shapes.  Both
sides derive the masks from the seed, so no indices are sent.  Dense tensors are sent unchanged.

Conversion happens where tensors are read from or written into a model (`clients.working_model`), and where a file of
weights is written.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fedsign.models.transform import Packing
from fedsign.parameterization.masks import Mask, gathered, put_back
from fedsign.records import Tensors


class RowPacking(Packing):
    """Sends the present weights of each sparse tensor as one row.

    Tensors of unexpected shapes pass unchanged; callers validate them.
    """

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        self._masks = masks
        self.masks = {name: mask.is_present for name, mask in masks.items()}

    def shape(self, name: str, whole: torch.Size) -> torch.Size:
        """The sent shape: [num] for a sparse tensor."""
        return torch.Size([self._masks[name].num]) if name in self._masks else whole

    def packed(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Rows of the sparse tensors, which are copies; other tensors are not copied."""
        return {name: self._row(name, tensor) for name, tensor in tensors.items()}

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A view in which each access to a sparse tensor unpacks its row."""
        return _Whole(tensors, self._masks)

    def put(self, name: str, sent: Tensor, into: Tensor) -> None:
        """Unpack a row into `into`; the tensor must have a mask."""
        mask = self._masks[name]
        into.zero_()  # a client that diverged may have left NaN in absent weights
        put_back(into, sent.to(into.device, into.dtype), mask)

    def _row(self, name: str, tensor: Tensor) -> Tensor:
        mask = self._masks.get(name)
        # the last dimensions, so that the stack [K, ...] of a cohort fits, too
        if mask is None or tensor.shape[-mask.is_present.dim() :] != mask.is_present.shape:
            return tensor
        return gathered(tensor, mask)


class _Whole(Mapping[str, Tensor]):
    """The mapping that `RowPacking.whole` returns."""

    def __init__(self, tensors: Mapping[str, Tensor], masks: Mapping[str, Mask]) -> None:
        self._tensors, self._masks = tensors, masks

    def __getitem__(self, name: str) -> Tensor:
        tensor, mask = self._tensors[name], self._masks.get(name)
        if mask is None or tensor.shape != (mask.num,):
            return tensor
        whole = tensor.new_zeros(mask.is_present.shape)
        put_back(whole, tensor, mask)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def rows_of(model: nn.Module, masks: Mapping[str, Mask]) -> RowPacking:
    """The packing of a model; tied tensors share their mask."""
    # by tensor: masks name a tied one once, a state_dict under each of its names
    of = {model.get_parameter(name): mask for name, mask in masks.items()}
    names = model.named_parameters(remove_duplicate=False)
    return RowPacking({name: of[parameter] for name, parameter in names if parameter in of})
