"""The training step whose bytes are counted: forward, backward, optimizer, with the moments already allocated.

Estimates run it on the meta device, measurements on a real one.

[Note: kernels] On the meta device torch decomposes attention, norms, and dropout, while real devices have fused kernels
for some of them, which save less for the backward pass.  `Kernels` dispatches as the real device would.  A model that
branches on a tensor, for example on whether any token is padding, always takes the branch for True.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedsign.memory.live import LiveBytes
from fedsign.memory.methods import blocks_of
from fedsign.optim.adamw_8bit import num_scales
from fedsign.optim.galore import galore as optim_galore

Device = Literal["cuda", "cpu"]
AttentionKind = Literal["fused", "math"]
AdamKind = Literal["fused", "foreach", "loop"]

EIGHT_BITS = torch.uint8  # moments of `fedsign.optim.adamw_8bit`
WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The inputs of a step; `loss` takes the model's outputs and the targets."""

    features: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


class Kernels(TorchFunctionMode):
    """Dispatch on the meta device as a real device would; see [Note: kernels]."""

    def __init__(self, device: Device, attention: AttentionKind) -> None:
        super().__init__()
        self._device, self._attention = device, attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a torch function by the device's kernel."""
        kwargs = kwargs or {}
        if func is Tensor.__bool__:
            return True
        if func is functional.scaled_dot_product_attention and self._attention == "fused":
            return _attention(*args, **kwargs)
        if func is functional.rms_norm and self._device == "cuda":
            return _rms_norm(*args, **kwargs)
        if func is functional.dropout and self._device == "cuda":
            return _dropout(*args, **kwargs)
        if func is getattr(torch, "_grouped_mm", None):  # experts of a mixture
            return _GroupedProduct.apply(args[0], args[1])  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _GroupedProduct(torch.autograd.Function):
    """Rows [S, K] times the matrix [K, N] of their group, of [G, K, N]; torch's own is of bf16 alone on meta."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        """[S, N]."""
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(len(rows), matrices.shape[2])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of both, that of the matrices for all groups."""
        rows, matrices = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(matrices)


def under_kernels(model: nn.Module, device: Device, attention: AttentionKind) -> None:
    """Run the forward passes of a model and of its blocks, which checkpointing recomputes, under `Kernels`."""
    for module in (model, *blocks_of(model)):
        forward = module.forward

        # a default binds this module's forward; a closure would see the loop's last one
        def inside(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            with Kernels(device, attention):
                return forward(*args, **kwargs)

        module.forward = inside


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Save queries, keys, values, the output, and one number per row, as the fused kernels of both devices do."""
    kept: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return kept[0]


def _rms_norm(
    input: Tensor, normalized_shape: Iterable[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    kept: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)
    return kept[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not p:
        return input
    kept: tuple[Tensor, Tensor] = torch.ops.aten.native_dropout(input, p, True)
    return kept[0]


class Moments(torch.optim.Optimizer):
    """The state of a fused AdamW, which needs no temporaries; parameters do not change.

    A `projected` matrix gets GaLore's projector and two moments of `rank` dimensions, and each step allocates GaLore's
    temporaries: the projected gradient and the step in full size.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        dtype: torch.dtype,
        masters: bool = False,
        projected: Iterable[nn.Parameter] = (),
        rank: int = 0,
    ) -> None:
        super().__init__(parameters, {})
        self._dtype, self._masters, self._projected, self._rank = dtype, masters, frozenset(projected), rank

    def step(self, closure: Any = None) -> Any:
        """Allocate the state in the first step, and the temporaries in every step."""
        for parameter in self.param_groups[0]["params"]:
            if parameter not in self.state:
                kept = self._kept(parameter)
                self.state[parameter] = {
                    str(index): parameter.new_zeros(shape, dtype=dtype) for index, (shape, dtype) in enumerate(kept)
                }
            if parameter in self._projected:
                # alive together, as in GaLore's step
                low_type = torch.float32 if self._dtype == EIGHT_BITS else self._dtype
                low = parameter.new_empty(self._shapes(parameter)[1], dtype=low_type)
                step = torch.empty_like(parameter)
                del low, step

    def _kept(self, parameter: nn.Parameter) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of what is kept for a parameter: moments, and a master."""
        masters = [(tuple(parameter.shape), torch.float32)] * self._masters
        if self._dtype != EIGHT_BITS:
            return [*((shape, self._dtype) for shape in self._shapes(parameter)), *masters]
        *projector, first, second = self._shapes(parameter)
        kept = [(shape, torch.float32) for shape in projector] + masters
        for shape in (first, second):
            scales = num_scales(prod(shape))
            kept += [(shape, torch.uint8 if scales else torch.float32), ((scales,), torch.float32)]
        return kept

    def _shapes(self, parameter: nn.Parameter) -> list[tuple[int, ...]]:
        if parameter not in self._projected:
            return [tuple(parameter.shape)] * 2
        shorter, longer = sorted(parameter.shape)
        rank = min(self._rank, shorter)
        return [(shorter, rank), (longer, rank), (longer, rank)]


def galore(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    """GaLore on the blocks' matrices; every step recomputes the projectors, which is the most expensive step."""
    return optim_galore(model, lr=0.0, weight_decay=0.0, rank=rank, update_proj_gap=1)


def keep_gradients_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert each gradient as soon as it is accumulated, as trainers with float32 gradients do."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.grad_dtype = None  # any type is allowed
            parameter.register_post_accumulate_grad_hook(lambda this: _turn(this, dtype))


def _turn(parameter: Tensor, dtype: torch.dtype) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(dtype)


def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step with zero gradients, so that the optimizer allocates its moments."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # None, so that the counted backward pass allocates the gradients
    optimizer.zero_grad(set_to_none=True)


def take_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, live: LiveBytes) -> None:
    """Take one step and report its phases to `live`."""
    live.begin(FORWARD)
    loss = batch.loss(model(batch.features), batch.targets)
    live.begin(BACKWARD)
    loss.backward()
    live.begin(OPTIMIZER)
    optimizer.step()


def next_tokens(num: int, tokens: int, vocabulary: int) -> Batch:
    """Random rows of tokens on the current default device."""
    # targets of their own: a shared storage would count once
    drawn = torch.randint(vocabulary, (num, tokens))
    return Batch(features=drawn, targets=drawn.clone(), loss=language_loss)


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in float32 whatever the logits' dtype, as in common libraries."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())  # [B T, V], [B T]
