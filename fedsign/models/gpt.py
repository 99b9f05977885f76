"""A decoder-only transformer, tokens [B, T] -> logits [B, T, V], from GPT-2 to LLaMA.

Pre-norm blocks on a residual stream x [B, T, width] with causal attention:

    x = embedding[tokens] (+ positions[0 .. T-1], learned)
    x = x + out(softmax(scale q k^T) v)      q, k, v = query(n), key(n), value(n); n = norm(x), scale = head_width^-0.5
    x = x + down(gelu(up(n)))                n = norm(x); swiglu: down(silu(gate(n)) * up(n))
    logits = head(norm(x))                   tied: norm(x) embedding^T

Papers: GPT-2, Radford et al. 2019 (`gelu` in its tanh form, `layer_norm`, `learned`, `bias`, `tied`); LLaMA, Touvron et
al. 2023 (arXiv 2302.13971: `swiglu`, `rms_norm`, `rotary`); rotary positions, Su et al. 2021 (arXiv 2104.09864), in the
layout of `transformers`, which rotates coordinate i with i + half a head; grouped-query attention, Ainslie et al. 2023
(arXiv 2305.13245): `num_kv_heads` key and value heads, each shared by several query heads.

All matrices start as N(0, init_std^2), except that `out` and `down`, which write to the stream 2 depth times, start
smaller by a factor of sqrt(2 depth) (GPT-2, section 2.3).  Biases start at 0.  Dropout follows the embedding and both
branches of each block; attention weights are not dropped.  A tied head is not a module: the state_dict holds the
embedding once.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedsign.errors import ConfigError
from fedsign.models.head import Width
from fedsign.tasks.documents import attention_mask, is_row_of_tokens, split

# B = samples in a batch, T = tokens in a sample, V = tokens in the vocabulary
Activation = Literal["gelu", "swiglu"]
Norm = Literal["layer_norm", "rms_norm"]
Positions = Literal["learned", "rotary"]
_LLAMA_MULTIPLE = 256  # LLaMA rounds feed-forward widths up to multiples of it


class Linear(nn.Linear):
    """nn.Linear without torch's initialization, because `GPT.initialize` overwrites it."""

    def reset_parameters(self) -> None:
        """Skip the default initialization."""


class Embedding(nn.Embedding):
    """nn.Embedding without torch's initialization."""

    def reset_parameters(self) -> None:
        """Skip the default initialization."""


class Attention(nn.Module):
    """Causal self-attention; groups of query heads share keys and values."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, *, bias: bool) -> None:
        super().__init__()
        head_width = width // num_heads
        self.query = Linear(width, width, bias=bias)
        self.key = Linear(width, num_kv_heads * head_width, bias=bias)
        self.value = Linear(width, num_kv_heads * head_width, bias=bias)
        self.out = Linear(width, width, bias=bias)
        self.scale = head_width**-0.5  # of the attention logits
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None = None) -> Tensor:
        """[B, T, width] -> [B, T, width]; a mask [B, 1, T, T] replaces the causal one."""
        query = self._heads(self.query(x), self.num_heads)
        key, value = (self._heads(layer(x), self.num_kv_heads) for layer in (self.key, self.value))
        if rotation is not None:
            query, key = rotated(query, *rotation), rotated(key, *rotation)
        heads = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        mixed: Tensor = self.out(heads.transpose(1, 2).flatten(2))  # [B, num, T, head width] -> [B, T, width]
        return mixed

    def _heads(self, x: Tensor, num: int) -> Tensor:
        return x.view(*x.shape[:2], num, -1).transpose(1, 2)  # [B, num, T, head width]


class FeedForward(nn.Module):
    """The position-wise feed-forward network."""

    def __init__(self, width: int, ffn_width: int, activation: Activation, *, bias: bool) -> None:
        super().__init__()
        self.gate = Linear(width, ffn_width, bias=bias) if activation == "swiglu" else None
        self.up = Linear(width, ffn_width, bias=bias)
        self.down = Linear(ffn_width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        up = self.up(x)
        hidden = functional.gelu(up, approximate="tanh") if self.gate is None else functional.silu(self.gate(x)) * up
        down: Tensor = self.down(hidden)
        return down


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, attention: Attention, ffn: FeedForward, norm: Callable[[], nn.Module], dropout: float) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.ffn_norm = norm()
        self.ffn = ffn
        self.dropout = dropout_of(dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None = None) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, mask))
        summed: Tensor = x + self.dropout(self.ffn(self.ffn_norm(x)))
        return summed


class GPT(nn.Module):
    """A decoder-only transformer over `num_outputs` tokens.

    A value of 0 means: for `num_kv_heads` all heads, for `ffn_width` the usual width (`ffn_width_of`), for
    `num_positions` the length of a sample.  `checkpoint_activations` saves only the activations between blocks and
    recomputes the rest in the backward pass.

    Raises:
        ConfigError: samples are not rows of tokens, or the widths do not divide.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        depth: Width = 4,
        width: Width = 128,
        num_heads: Width = 4,
        num_kv_heads: Annotated[int, Field(ge=0)] = 0,
        ffn_width: Annotated[int, Field(ge=0)] = 0,
        activation: Activation = "gelu",
        norm: Norm = "layer_norm",
        norm_eps: Annotated[float, Field(gt=0)] = 1e-5,
        tied: bool = True,
        positions: Positions = "learned",
        num_positions: Annotated[int, Field(ge=0)] = 0,
        rotary_base: Annotated[float, Field(gt=1)] = 10_000.0,
        bias: bool = True,
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        init_std: Annotated[float, Field(gt=0)] = 0.02,
        checkpoint_activations: bool = False,
    ) -> None:
        if not is_row_of_tokens(input_shape):
            raise ConfigError(
                f"model.name=gpt takes rows of tokens, but a sample has the shape {tuple(input_shape)}; "
                "use it with data of text."
            )
        num_kv_heads, ffn_width = num_kv_heads or num_heads, ffn_width or ffn_width_of(width, activation)
        _check_heads(width, num_heads, num_kv_heads, positions)
        super().__init__()
        self.design = (positions, norm, activation)
        self.head_width, self.num_positions = width // num_heads, num_positions or input_shape[0]
        self.rotary_base, self.init_std, self.checkpoint_activations = rotary_base, init_std, checkpoint_activations
        rms, layer = partial(nn.RMSNorm, width, eps=norm_eps), partial(nn.LayerNorm, width, eps=norm_eps, bias=bias)
        norm_of: Callable[[], nn.Module] = rms if norm == "rms_norm" else layer
        self.embedding = Embedding(num_outputs, width)
        self.positions = Embedding(self.num_positions, width) if positions == "learned" else None
        self.dropout = dropout_of(dropout)
        self.blocks = nn.ModuleList(
            Block(
                Attention(width, num_heads, num_kv_heads, bias=bias),
                FeedForward(width, ffn_width, activation, bias=bias),
                norm_of,
                dropout,
            )
            for _ in range(depth)
        )
        self.norm = norm_of()
        self.head = None if tied else Linear(width, num_outputs, bias=False)
        self.initialize()

    def forward(self, rows: Tensor) -> Tensor:
        """Tokens [B, T], or [B, T, 2] with positions of packed documents -> logits [B, T, vocabulary].

        Raises:
            ConfigError: a row has more tokens than there are learned positions.
        """
        tokens, positions = split(rows)
        mask = None if positions is None else attention_mask(positions)
        x, rotation = self.embedding(tokens), None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions is None:
            rotation = rotations(positions, self.head_width, self.rotary_base)
        elif tokens.shape[1] > self.num_positions:
            raise ConfigError(
                f"a sample of {tokens.shape[1]} tokens was given to model.name=gpt with {self.num_positions} learned "
                "positions; give shorter samples, raise model.num_positions, or use model.positions=rotary, "
                "which has no end."
            )
        else:
            x = x + self.positions(positions)
        x = self.dropout(x)
        keeps_little = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            # reentrant checkpoints skip the gradients of a block whose input needs none (a frozen embedding, LoRA)
            x = checkpoint(block, x, rotation, mask, use_reentrant=False) if keeps_little else block(x, rotation, mask)
        x = self.norm(x)
        logits: Tensor = functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return logits

    @property
    def ends(self) -> tuple[nn.Module, ...]:
        """The embedding, and the head unless it is tied."""
        return (self.embedding,) if self.head is None else (self.embedding, self.head)

    @property
    def model_roles(self) -> dict[str, Any]:
        """Fields of `fedsign.parameterization.roles.ModelRoles`: the roles of tensors and modules, by name patterns."""
        blocks = [f"blocks.{index}" for index in range(len(self.blocks))]
        return {
            "width": self.embedding.embedding_dim,
            "embedding": ("embedding.weight", "positions.weight"),
            "unembedding": ("head.weight",),
            "residual": ("*.out.weight", "*.down.weight"),
            "depth": len(self.blocks),
            "inputs": ("embedding",) if self.positions is None else ("embedding", "positions"),
            "outputs": ("norm",),
            "output_is_a_norm": True,  # a tied head is not a module
            "attention": {f"{block}.attention": self.head_width for block in blocks},
            "watched": tuple(f"{block}.{part}" for block in blocks for part in ("attention", "ffn")),
        }

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialize all tensors as the module describes, from torch's global generator."""
        std = self.init_std
        # draws follow the order of registration: moving a submodule in __init__ changes every seeded run
        for name, module in self.named_modules():
            match module:
                case nn.Linear() | nn.Embedding():
                    adds = name.endswith((".out", ".down"))  # to the residual stream
                    nn.init.normal_(module.weight, std=std / (2 * len(self.blocks)) ** 0.5 if adds else std)
                    if isinstance(module, nn.Linear) and module.bias is not None:
                        nn.init.zeros_(module.bias)
                case nn.LayerNorm() | nn.RMSNorm():
                    module.reset_parameters()


gpt = GPT


def dropout_of(rate: float) -> nn.Module:
    """Dropout, or the identity for a rate of 0."""
    return nn.Dropout(rate) if rate else nn.Identity()


def rotations(positions: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position x base^(-2i / head_width), in float32 as in `transformers`.

    [T, head_width] of positions [T], and [B, 1, T, head_width] of positions [B, T].
    """
    exponents = torch.arange(0, head_width, 2, device=positions.device).float() / head_width
    # bf16 represents integers exactly only up to 256; later positions would share their angles
    angles = positions.float()[..., None] * (1.0 / base**exponents)
    angles = torch.cat([angles, angles], dim=-1)  # coordinates i and i + half share an angle
    if positions.dim() == 2:
        angles = angles[:, None]  # the same for all heads
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of a head's coordinates by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines.to(x.dtype) + torch.cat([-second, first], dim=-1) * sines.to(x.dtype)


def ffn_width_of(width: int, activation: Activation) -> int:
    """The usual feed-forward width: 4 width for gelu; LLaMA's 8/3 width, rounded up, for swiglu.

    >>> ffn_width_of(768, "gelu"), ffn_width_of(4096, "swiglu"), ffn_width_of(64, "swiglu")
    (3072, 11008, 192)
    """
    if activation == "gelu":
        return 4 * width
    # capped: at width 16, rounding 42 up to 256 would make the layer six times as wide
    multiple = min(_LLAMA_MULTIPLE, width)
    return -(-(8 * width // 3) // multiple) * multiple


def _check_heads(width: int, num_heads: int, num_kv_heads: int, positions: Positions) -> None:
    settings = f"model.width={width}, model.num_heads={num_heads}, model.num_kv_heads={num_kv_heads}"
    if width % num_heads or num_heads % num_kv_heads:
        raise ConfigError(
            f"{settings} were given; expected a width that is a multiple of num_heads, which is one of num_kv_heads."
        )
    if positions == "rotary" and width // num_heads % 2:
        raise ConfigError(
            f"{settings} were given with model.positions=rotary, which turns pairs of a head's {width // num_heads} "
            "coordinates; make width / num_heads even."
        )
