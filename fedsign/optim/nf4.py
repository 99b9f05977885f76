"""Linear layers whose frozen matrix is stored in 4 bits: the base of QLoRA.

Paper: Dettmers et al. 2023 (arXiv 2305.14314), section 3: NormalFloat4 in blocks of 64 with 8-bit scales (double
quantization), 4.13 bits per weight.  A pass dequantizes to the dtype of the former weights, and saves no dequantized
matrix for the backward pass.  The code is that of `bitsandbytes`.

Every process quantizes the same weights on the CPU, so that the base is the same everywhere and never sent.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedsign.optim.bnb import bitsandbytes

_FEATURE = "client.optimizer.quantization=nf4"


class NF4Linear(nn.Module):
    """Replaces a linear layer, or GPT-2's `Conv1D`, which stores its matrix as [in, out]."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Module, *, is_transposed: bool) -> None:
        """Quantize a layer's matrix, which is then freed.

        Raises:
            ConfigError: `bitsandbytes` is missing.
        """
        super().__init__()
        self._is_transposed = is_transposed
        weight = layer.get_parameter("weight").detach()
        bias = layer._parameters["bias"]
        self.register_buffer("packed", torch.empty(0), persistent=False)
        self.packed, self._state = bitsandbytes(_FEATURE).functional.quantize_4bit(
            (weight.T if is_transposed else weight).contiguous(), quant_type="nf4", compress_statistics=True
        )
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        layer._parameters["weight"] = None
        self._layer = (layer,)  # a tuple hides it from nn.Module's registration

    @property
    def weight(self) -> Tensor:
        """The dequantized matrix [out, in]."""
        dequantized: Tensor = bitsandbytes(_FEATURE).functional.dequantize_4bit(self.packed, self._state)
        return dequantized

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        outputs: Tensor = bitsandbytes(_FEATURE).matmul_4bit(x, self.packed, self._state, bias=self.bias)
        return outputs

    def plain(self) -> nn.Module:
        """The former layer, with the dequantized matrix."""
        (layer,) = self._layer
        weight = self.weight
        layer.register_parameter("weight", nn.Parameter(weight.T.contiguous() if self._is_transposed else weight))
        layer.register_parameter("bias", None if self.bias is None else nn.Parameter(self.bias))
        return layer

    def share(self, name: str, shared: dict[str, Tensor]) -> None:
        """Take the tensors of another model's layer of this name, or give ours."""
        self.packed = shared.setdefault(f"{name}.packed", self.packed)
        self._state.absmax = shared.setdefault(f"{name}.absmax", self._state.absmax)

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix."""
        return int(self.packed.nbytes + self._state.absmax.nbytes + self._state.state2.absmax.nbytes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._state.to(self.packed.device)  # in place
        return self


def quantize(model: nn.Module) -> None:
    """Quantize the adapted linear layers of a model with adapters of `peft`."""
    # the library keeps a table for the scales, that of the first call: with values, also for a model on the meta device
    with torch.device("cpu"):
        bitsandbytes(_FEATURE).functional.quantize_blockwise(torch.zeros(1))
    for layer in list(model.modules()):
        # those of experts have a `parameter_name`
        if hasattr(layer, "lora_A") and not hasattr(layer, "parameter_name"):
            wrapper: Any = layer
            wrapper.base_layer = NF4Linear(wrapper.base_layer, is_transposed=bool(wrapper.fan_in_fan_out))


def nf4_bytes(num_elements: int) -> int:
    """The bytes of a matrix: half of one per element, one per block of 64, and 4 per 256 of these.

    >>> nf4_bytes(2**20) * 8 / 2**20
    4.126953125
    """
    blocks = -(-num_elements // 64)
    return -(-num_elements // 2) + blocks + 4 * -(-blocks // 256)
