"""Fine-tuning methods: which tensors each one trains and adds, and what optimizer state it keeps.

- `full`:    AdamW on all parameters.
- `lora`:    all frozen, plus trained A [r, in] and B [out, r] at every linear layer, W x + (alpha / r) B A x, embedding
             and head included, as in the authors' script for the LISA paper's table (arXiv 2403.17919).
- `galore`:  all trained; each m x n matrix in a block keeps its moments in r dimensions (arXiv 2403.03507).  If m >= n,
             the projector is [n, r] and the two moments [m, r]; otherwise [m, r] and [r, n].  r is at most the shorter
             side.  The counted step recomputes the projectors.
- `E+H`:     LISA without blocks: embedding, head, and everything else outside the blocks.
- `E+H+2L`:  LISA with two blocks at a time.  The estimate uses the last two, whose gradients arrive while all other
             activations are still alive: the worst case, up to a few temporaries.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from fedsign.errors import ConfigError, nearest
from fedsign.optim.blocks import find_blocks

DEFAULT = ("full", "lora", "galore", "E+H", "E+H+2L", "E+H+4L")

_LISA = re.compile(r"e\+h(?:\+(\d+)l)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A fine-tuning method; `num_layers` applies to LISA, `rank` to LoRA and GaLore."""

    name: str
    kind: str  # full, lora, galore or lisa
    num_layers: int = 0
    rank: int = 0
    dropout: float = 0.0

    def apply(self, model: nn.Module) -> None:
        """Freeze and adapt a model in place.

        Raises:
            ConfigError: the model has no blocks, too few blocks, or no linear layers.
        """
        if self.kind == "lora":
            adapt(model, rank=self.rank, dropout=self.dropout)
        elif self.kind == "lisa":
            self._freeze(model)

    def projected(self, model: nn.Module) -> set[nn.Parameter]:
        """The matrices whose moments have `rank` dimensions."""
        if self.kind != "galore":
            return set()
        inside = {parameter for block in self._blocks(model) for parameter in block.parameters()}
        return {parameter for parameter in inside if parameter.dim() == 2}

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        try:
            return list(find_blocks(model).values())
        except ConfigError as error:
            reason, *_ = str(error).split(";")
            raise ConfigError(f"the method {self.name} was asked for, but {reason}; choose other --methods.") from error

    def _freeze(self, model: nn.Module) -> None:
        blocks = self._blocks(model)
        if self.num_layers > len(blocks):
            raise ConfigError(
                f"the method {self.name} was asked for, but the model has {len(blocks)} blocks; "
                f"expected at most E+H+{len(blocks)}L."
            )
        for block in blocks[: len(blocks) - self.num_layers]:
            block.requires_grad_(False)


def methods_of(names: Iterable[str], *, rank: int, dropout: float = 0.0) -> list[Method]:
    """Parse method names.

    >>> [method.num_layers for method in methods_of(["full", "e+h", "E+H+4L", "lisa"], rank=8)]
    [0, 0, 4, 2]

    Raises:
        ConfigError: a name is unknown.
    """
    methods = []
    for name in names:
        lower = "e+h+2l" if name.lower() == "lisa" else name.lower()
        lisa = _LISA.fullmatch(lower)
        if lisa is not None:
            methods.append(Method(name=lower.upper(), kind="lisa", num_layers=int(lisa[1] or 0)))
        elif lower in ("full", "lora", "galore"):
            title = lower if lower == "full" else f"{lower} r{rank}"
            methods.append(Method(name=title, kind=lower, rank=rank, dropout=dropout))
        else:
            raise ConfigError(
                f"the method '{name}' was given.{nearest(lower, ['full', 'lora', 'galore', 'lisa', 'e+h'])} "
                "Expected full, lora, galore, lisa, E+H or E+H+nL with a number n of blocks."
            )
    return methods


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's blocks; empty if they cannot be identified."""
    try:
        return list(find_blocks(model).values())
    except ConfigError:
        return []


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank adapter."""

    def __init__(self, layer: nn.Linear | nn.Embedding, *, rank: int, dropout: float) -> None:
        super().__init__()
        self.layer = layer
        # Linear: [out, in]; Embedding: [num, width], a matrix applied to one-hot tokens
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        # zeros: only shapes matter here
        self.down = nn.Parameter(layer.weight.new_zeros(rank, inputs))
        self.up = nn.Parameter(layer.weight.new_zeros(outputs, rank))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scale = 1.0  # alpha / r

    @property
    def weight(self) -> Tensor:
        """The frozen layer's weight, for a tied head."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output plus the adapter's."""
        if isinstance(self.layer, nn.Embedding):
            low = functional.embedding(x, self.down.t())
        else:
            low = functional.linear(self.dropout(x), self.down)
        outputs: Tensor = self.layer(x) + functional.linear(low, self.up) * self.scale
        return outputs


def adapt(model: nn.Module, *, rank: int, dropout: float) -> None:
    """Add an adapter to every linear layer and embedding; a tied head is no module and gets none."""
    model.requires_grad_(False)
    layers = list(_layers(model))
    if not layers:
        raise ConfigError(
            f"lora was asked for, but the {type(model).__name__} has no linear layers; choose other --methods."
        )
    for parent, name, layer in layers:
        setattr(parent, name, Adapted(layer, rank=rank, dropout=dropout))


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | nn.Embedding]]:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | nn.Embedding):
                yield parent, name, child
