"""Matrix products of sparse linear layers that skip absent weights, with torch's CSR matrices on a CPU.

For a layer with masked weights W [out, in], inputs x [B, in], and output gradients g [B, out]:

    y  = x W^T                           csr(W) [out, in] times x^T [in, B], transposed copies
    dx = g W                             csr(W^T) [in, out] times g^T [out, B]
    dW = g^T x at present weights        one inner product of length B each, 0 elsewhere

Results equal the dense products up to rounding.  Weights and their gradients stay dense tensors; the CSR indices are
computed once per mask and take 12 bytes per present weight.

[Note: when compressed rows pay] Dense products take 6 B in out operations.  CSR products take that times the density,
at a tenth of the speed, and transpose inputs and outputs.  `auto` uses CSR where it was faster in
`benchmarks/alone/sparse.py`, forward and backward together: at densities up to 1/16 with B in out >= 2^26.  The rule
depends on shapes alone, not on the machine's load, so all processes of an experiment decide alike.  Convolutions, bf16,
torch.compile, and GPUs use dense products; a GPU's sparse tensor cores need 2 of every 4 neighbors, not random masks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedsign.errors import ConfigError
from fedsign.parameterization.masks import Columns, Mask

MOST_DENSITY: Final = 1 / 12  # between the measured densities, since a random mask meets its density only roughly
LEAST_PRODUCTS: Final = 2**26  # B in out


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """Settings of [engine] for the products of sparse layers in training."""

    kind: Literal["auto", "dense", "csr"] = "auto"
    precision: str = "float32"
    compile: bool = False


def multiply_sparsely(model: nn.Module, masks: Mapping[str, Mask], products: Products) -> None:
    """Replace the forward of a model's sparse linear layers for training; second derivatives are not supported.

    Raises:
        ConfigError: CSR was requested but is not available.
    """
    lacking = _lacking(products, next(model.parameters()).device)
    if products.kind == "csr" and lacking:
        raise ConfigError(
            f"engine.sparse_products=csr was given with {lacking}, but compressed rows are for float32 on a CPU with "
            "MKL, "
            "not compiled; use engine.sparse_products=auto."
        )
    if products.kind == "dense" or lacking:
        return
    of: dict[Tensor, Mask] = {model.get_parameter(name): mask for name, mask in masks.items()}
    always = products.kind == "csr"
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module.weight in of:
            # on the instance: nn.Module calls self.forward, so hooks still run
            vars(module)["forward"] = SparseForward(module, of[module.weight], always=always)


def pays(mask: Mask, num_rows: int) -> bool:
    """The rule of `auto`; see [Note: when compressed rows pay]."""
    entries = mask.is_present.numel()
    return num_rows * entries >= LEAST_PRODUCTS and mask.num <= MOST_DENSITY * entries


def _lacking(products: Products, device: torch.device) -> str:
    """The setting that rules out CSR; empty if it is available."""
    if device.type != "cpu":
        return f"engine.device={device}"
    if products.precision != "float32":
        return f"engine.precision={products.precision}"
    if products.compile:
        return "engine.compile=true"
    return "" if torch.backends.mkl.is_available() else "a torch that was built without MKL"


class SparseForward:
    """Replaces the `forward` of a linear layer."""

    def __init__(self, module: nn.Linear, mask: Mask, *, always: bool) -> None:
        self._module, self._mask, self._always = module, mask, always

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        weight, bias = self._module.weight, self._module.bias
        rows = x.reshape(-1, x.shape[-1])
        if not self._is_compressed(len(rows)):
            return nn.functional.linear(x, weight, bias)
        # [B, in], with B over all leading dimensions of x
        product: Tensor = _Product.apply(rows, weight, self._mask.columns)  # type: ignore[no-untyped-call]
        return (product if bias is None else product + bias).view(*x.shape[:-1], -1)

    def _is_compressed(self, num_rows: int) -> bool:
        """Whether to use CSR: not if absent weights need gradients, or if the weight may violate the mask."""
        # functional_call puts a plain tensor there, which need not obey the mask
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
        # CSR times dense puts the sparse factor first, hence y^T = W x^T
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
            at = columns.rows(torch.zeros(len(columns.indices), dtype=weight.dtype))
            # both factors are contiguous along B, over which each inner product runs
            product = torch.sparse.sampled_addmm(at, turned, x.t().contiguous().t(), beta=0.0)
            of_weight = torch.zeros_like(weight)
            of_weight.view(-1)[columns.indices] = product.values()
        return of_x, of_weight, None


def _values(weight: Tensor, columns: Columns) -> Tensor:
    return weight.reshape(-1).index_select(0, columns.indices)
