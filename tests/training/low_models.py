"""Models whose weights are stored below float32, for tests."""

import torch
from torch import Tensor, nn

from fedsign.models.mlp import mlp

DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Low(nn.Module):
    """A network in another dtype, whose inputs are float32."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network.to(dtype)
        self._dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs, in its dtype."""
        outputs: Tensor = self.network(x.to(self._dtype))
        return outputs


def network(
    input_shape: tuple[int, ...], num_outputs: int, *, dtype: str = "bf16", hidden: tuple[int, ...] = (32, 32, 32)
) -> Low:
    """A perceptron with blocks, in `dtype`; it starts from the same values in all."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for width in hidden]
    first, last = mlp(input_shape, hidden[0], hidden=()), nn.Linear(hidden[-1], num_outputs)
    return Low(nn.Sequential(first, nn.Sequential(*blocks), last).bfloat16(), DTYPES[dtype])
