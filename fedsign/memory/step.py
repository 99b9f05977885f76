"""A step of training whose bytes are counted: forward, backward, optimizer, from the second step on, when there are moments.

The same step is taken by an estimate, on the meta device, where tensors have shapes and no values, and by a measurement, on a
real one.  [Note: kernels] On the meta device torch takes the general way through attention, norms and dropout; a
GPU, or a CPU, has a kernel of its own for some of them, which keeps less.  `Kernels` takes the ways that the device would.
Where a model asks for the truth of a tensor, such as whether no token is padding, the answer is yes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedsign.memory.live import LiveBytes
from fedsign.memory.methods import blocks_of
from fedsign.optim.galore import galore as optim_galore

Device = Literal["cuda", "cpu"]
AttentionKind = Literal["fused", "math"]
AdamKind = Literal["fused", "foreach", "loop"]

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a step is taken on; `loss` takes the model's outputs and the targets."""

    features: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


class Kernels(TorchFunctionMode):
    """On the meta device, what a real device would do; see [Note: kernels]."""

    def __init__(self, device: Device, attention: AttentionKind) -> None:
        super().__init__()
        self._device, self._attention = device, attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch's."""
        kwargs = kwargs or {}
        if func is Tensor.__bool__:
            return True
        if func is functional.scaled_dot_product_attention and self._attention == "fused":
            return _attention(*args, **kwargs)
        if func is functional.rms_norm and self._device == "cuda":
            return _rms_norm(*args, **kwargs)
        if func is functional.dropout and self._device == "cuda":
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def under_kernels(model: nn.Module, device: Device, attention: AttentionKind) -> None:
    """Play every pass of a model under `Kernels`, and those of its blocks, which are played once more where activations are checkpointed."""
    for module in (model, *blocks_of(model)):
        forward = module.forward

        def inside(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            with Kernels(device, attention):
                return forward(*args, **kwargs)

        module.forward = inside


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Keeps queries, keys, values, the outcome and a number for each row, as the fused kernels of both devices do."""
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
    """What an AdamW keeps that takes nothing for itself, as fused kernels do.  It moves nothing.

    Of a matrix that is `projected` it keeps GaLore's projector and its two moments of `rank` dimensions, and takes what
    GaLore takes in turn: the gradient projected, the step projected back.
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
        """Make what is kept, the first time, and what is needed in between, every time."""
        for parameter in self.param_groups[0]["params"]:
            if parameter not in self.state:
                shapes = [*self._shapes(parameter), *[tuple(parameter.shape)] * self._masters]
                kept = {str(index): parameter.new_zeros(shape, dtype=self._dtype) for index, shape in enumerate(shapes)}
                self.state[parameter] = kept
            if parameter in self._projected:
                low = parameter.new_empty(self._shapes(parameter)[1], dtype=self._dtype)
                step = torch.empty_like(parameter)
                del low, step

    def _shapes(self, parameter: nn.Parameter) -> list[tuple[int, ...]]:
        if parameter not in self._projected:
            return [tuple(parameter.shape)] * 2
        shorter, longer = sorted(parameter.shape)
        rank = min(self._rank, shorter)
        return [(shorter, rank), (longer, rank), (longer, rank)]


def galore(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    """GaLore of the blocks' matrices, which makes its projectors anew in every step: the one that takes most."""
    return optim_galore(model, lr=0.0, weight_decay=0.0, rank=rank, update_proj_gap=1)


def keep_gradients_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Each gradient is turned into another type as soon as it is there, as trainers do who keep them in float32."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.grad_dtype = None  # any type is allowed
            parameter.register_post_accumulate_grad_hook(lambda this: _turn(this, dtype))


def _turn(parameter: Tensor, dtype: torch.dtype) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(dtype)


def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's first step, from gradients of 0, after which its moments are there."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def take_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, live: LiveBytes) -> None:
    """One step, whose phases `live` is told of."""
    live.begin(FORWARD)
    loss = batch.loss(model(batch.features), batch.targets)
    live.begin(BACKWARD)
    loss.backward()
    live.begin(OPTIMIZER)
    optimizer.step()


def next_tokens(num: int, tokens: int, vocabulary: int) -> Batch:
    """Rows of text, drawn at random, on the device of the moment."""
    drawn = torch.randint(vocabulary, (num, tokens))
    return Batch(features=drawn, targets=drawn.clone(), loss=language_loss)


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the next tokens, in float32 whatever the logits' type, as the libraries take it."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
