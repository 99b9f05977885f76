"""Tensors that move to a device on access, so unread ones never take memory there."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor


class OnDevice(Mapping[str, Tensor]):
    """A mapping whose tensors move to a device on access; only those in `keep` are cached there.

    >>> held = OnDevice({"weight": torch.ones(2), "bias": torch.ones(2)}, torch.device("meta"), keep={"weight"})
    >>> held["weight"] is held["weight"], held["bias"] is held["bias"]
    (True, False)
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        *,
        keep: Collection[str] = (),
        types: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """`types` optionally gives the dtypes to convert to, by name."""
        self._tensors, self._device, self._types = tensors, device, types or {}
        self._kept: dict[str, Tensor | None] = dict.fromkeys(keep)

    def keep(self, names: Collection[str]) -> None:
        """Cache these tensors from now on, and release all others."""
        self._kept = {name: self._kept.get(name) for name in names}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, on the device."""
        held = self._kept.get(name)
        if held is None:
            tensor = self._tensors[name]
            held = tensor.to(self._device, self._types.get(name, tensor.dtype))
            if name in self._kept:
                self._kept[name] = held
        return held

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._tensors)
