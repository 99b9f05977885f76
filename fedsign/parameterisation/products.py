"""Products of sparse layers that leave out the weights that are not there: torch's compressed rows (CSR), on a CPU.

Of a linear layer with weights W [out, in] under a mask, inputs x [B, in] and gradients g [B, out] of its outputs:

    y  = x W^T                           csr(W) [out, in] times x^T [in, B], laid out anew
    dx = g W                             csr(W^T) [in, out] times g^T [out, B]
    dW = g^T x where there are weights   one inner product of length B for each, 0 elsewhere

The results are those of the whole products to rounding.  Weights and their gradients stay whole tensors; which columns
there are is worked out once for a mask, and takes 12 bytes for each weight that there is.

[Note: when compressed rows pay] Whole products do 6 B in out operations, compressed ones 6 B in out times the density, but at a
tenth of the speed, and they lay out inputs and outputs anew.  `auto` takes them where they paid in `benchmarks/alone/sparse.py`,
forward and backward together: at a density of 1/16 or less, if B in out is 2^26 or more.  The rule knows the shapes and nothing of
the machine's load, so that every process of an experiment decides alike.  Convolutions, bf16, torch.compile and GPUs take
whole products: a GPU's sparse tensor cores want 2 of every 4 neighbors, which is a mask of density 1/2 that is not random.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsign.errors import ConfigError
from fedsign.parameterisation.masks import Columns, Mask

MOST_DENSITY: Final = 1 / 12  # between the densities that were tried: a random mask has about its density
LEAST_PRODUCTS: Final = 2**26  # B in out


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """How [engine] computes the products of sparse layers in training."""

    kind: Literal["auto", "dense", "csr"] = "auto"
    precision: str = "float32"
    compile: bool = False


def multiply_sparsely(model: nn.Module, masks: Mapping[str, Mask], products: Products) -> None:
    """Let a model's sparse linear layers compute as [engine] says; for training: there are no second derivatives.

    Raises:
        ConfigError: compressed rows were asked for, and cannot be had.
    """
    lacking = _lacking(products, next(model.parameters()).device)
    if products.kind == "csr" and lacking:
        raise ConfigError(
            f"engine.sparse_products=csr was given with {lacking}, but compressed rows are for float32 on a CPU with MKL, not compiled; "
            "use engine.sparse_products=auto."
        )
    if products.kind == "dense" or lacking:
        return
    of: dict[Tensor, Mask] = {model.get_parameter(name): mask for name, mask in masks.items()}
    always = products.kind == "csr"
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module.weight in of:
            vars(module)["forward"] = SparseForward(module, of[module.weight], always=always)


def pays(mask: Mask, num_rows: int) -> bool:
    """The rule of `auto`; see [Note: when compressed rows pay]."""
    entries = mask.is_there.numel()
    return num_rows * entries >= LEAST_PRODUCTS and mask.num <= MOST_DENSITY * entries


def _lacking(products: Products, device: torch.device) -> str:
    """Why there are no compressed rows; nothing if there are."""
    if device.type != "cpu":
        return f"engine.device={device}"
    if products.precision != "float32":
        return f"engine.precision={products.precision}"
    if products.compile:
        return "engine.compile=true"
    return "" if torch.backends.mkl.is_available() else "a torch that was built without MKL"


class SparseForward:
    """What a linear layer does in place of its own `forward`."""

    def __init__(self, module: nn.Linear, mask: Mask, *, always: bool) -> None:
        self._module, self._mask, self._always = module, mask, always

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight, bias = self._module.weight, self._module.bias
        rows = x.reshape(-1, x.shape[-1])
        if not self._is_compressed(len(rows)):
            return nn.functional.linear(x, weight, bias)
        product: Tensor = _Product.apply(rows, weight, self._mask.columns)  # type: ignore[no-untyped-call]
        return (product if bias is None else product + bias).view(*x.shape[:-1], -1)

    def _is_compressed(self, num_rows: int) -> bool:
        """Gradients of absent weights, and weights that need not lie under this mask, want whole products."""
        if not self._module.training or self._mask.keeps_gradient or not isinstance(self._module.weight, nn.Parameter):
            return False
        return self._always or pays(self._mask, num_rows)


class _Product(torch.autograd.Function):
    """x [B, in], W [out, in] -> x W^T [B, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, columns: Columns) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.columns = columns
        rows = columns.rows(_values(weight, columns))
        return (rows @ x.t().contiguous()).t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        columns: Columns = ctx.columns
        turned = gradient.t().contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = (columns.turned_rows(_values(weight, columns)) @ turned).t().contiguous()
        if ctx.needs_input_grad[1]:
            at = columns.rows(torch.zeros(len(columns.places), dtype=weight.dtype))
            found = torch.sparse.sampled_addmm(at, turned, x.t().contiguous().t(), beta=0.0)
            of_weight = torch.zeros_like(weight)
            of_weight.view(-1)[columns.places] = found.values()
        return of_x, of_weight, None


def _values(weight: Tensor, columns: Columns) -> Tensor:
    return weight.reshape(-1).index_select(0, columns.places)
