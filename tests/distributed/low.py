"""Models in bf16 for `tests.distributed.parity`, and a federation whose gradients bf16 holds exactly.

Samples are zeros and ones, and the loss is linear in the outputs with factors of -1, 0 and 1.  A model that is linear
in its weights then has gradients k / 8 in batches of 8, with integers |k| <= 8, and so have parts of a batch.  No sum
is rounded, in any order, so that steps on ranks have to be those of one process to the bit.

With a learning rate that is no power of 2, torch's own step in bf16 depends on where an element lies: at the end of a
tensor, its kernels round once more.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fedsign.data.base import Dataset, Samples
from fedsign.data.digits import digits
from tests.distributed.federation import Deep
from tests.training.low_models import DTYPES, Low


def binary_digits(seed: int) -> Dataset:
    """128 of the digits in black and white, for 4 clients of 32."""
    whole = digits(seed)
    parts = []
    for part, num in ((whole.train, 128), (whole.test, 40)):
        assert isinstance(part, Samples)
        parts.append(replace(part, features=(part.features[:num] > 0).float(), targets=part.targets[:num]))
    train, test = parts
    return replace(whole, train=train, test=test)


class Signed:
    """The mean over samples of a sum of outputs, whose factors depend on the target."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        signs = (targets[:, None] + torch.arange(outputs.shape[1])) % 3 - 1
        return (outputs * signs).sum(1).mean()


class Parallel(nn.Module):
    """Layers side by side in bf16, one of them frozen, a shift in float32, and a layer that no sample passes."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(num_inputs, num_outputs) for _ in range(3)])
        self.frozen = nn.Linear(num_inputs, num_outputs).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.bfloat16()
        self.shift = nn.Parameter(torch.full((num_outputs,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.bfloat16()
        summed = sum((layer(x) for layer in self.layers), start=self.frozen(x))
        return summed + self.shift


def parallel(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Parallel(input_shape[0], num_outputs)


def low_deep(input_shape: tuple[int, ...], num_outputs: int, *, dtype: str = "bf16") -> nn.Module:
    """The network of other rows, which starts from the same values in all types."""
    return Low(Deep(input_shape[0], num_outputs).bfloat16(), DTYPES[dtype])


EXACT = {
    "model": {"name": f"{__name__}:parallel"},
    "task": f"{__name__}:Signed",
    "data": {"name": f"{__name__}:binary_digits"},
    "partition": {"name": "iid", "num_clients": 4},
}
DEEP = {"name": f"{__name__}:low_deep"}
