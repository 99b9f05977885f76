"""Ways to fine-tune, as what they make of a model: what is trained, what is added, and what an optimizer keeps of each tensor.

- `full`:    AdamW on all.
- `lora`:    all frozen, and W x + (alpha / r) B A x at every linear layer, embedding and head included, as in the authors'
             script for the paper's table (arXiv 2403.17919): A [r, in], B [out, r] are trained.
- `galore`:  all trained; of a matrix in a block the moments live in r dimensions (arXiv 2403.03507): for m x n with m >= n
             a projector [n, r] and two moments [m, r], otherwise a projector [m, r] and two moments [r, n], with r at most the
             shorter side.  The step is one in which projectors are made anew.
- `E+H`:     LISA with no block: embedding and head, and all else that lies outside the blocks.
- `E+H+2L`:  LISA with two blocks at a time.  They are the last two here, whose gradients come while the activations of all
             others are still there: the worst case, to a few temporaries.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from fedsign.errors import ConfigError
from fedsign.optim.blocks import find_blocks
from fedsign.registry import nearest

DEFAULT = ("full", "lora", "galore", "E+H", "E+H+2L", "E+H+4L")

_LISA = re.compile(r"e\+h(?:\+(\d+)l)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way to fine-tune; `num_layers` is LISA's, `rank` that of LoRA and GaLore."""

    name: str
    kind: str  # full, lora, galore or lisa
    num_layers: int = 0
    rank: int = 0
    dropout: float = 0.0

    def apply(self, model: nn.Module) -> None:
        """Freeze and adapt a model in place.

        Raises:
            ConfigError: the model has no blocks, or not so many, or no linear layers.
        """
        if self.kind == "lora":
            adapt(model, rank=self.rank, dropout=self.dropout)
        elif self.kind == "lisa":
            self._freeze(model)

    def projected(self, model: nn.Module) -> set[nn.Parameter]:
        """The matrices of which an optimizer keeps moments of `rank` dimensions."""
        if self.kind != "galore":
            return set()
        inside = {parameter for block in self._blocks(model) for parameter in block.parameters()}
        return {parameter for parameter in inside if parameter.dim() == 2}

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        try:
            return list(find_blocks(model).values())
        except ConfigError as error:
            said, *_ = str(error).split(";")
            raise ConfigError(f"the method {self.name} was asked for, but {said}; choose other --methods.") from error

    def _freeze(self, model: nn.Module) -> None:
        blocks = self._blocks(model)
        if self.num_layers > len(blocks):
            raise ConfigError(
                f"the method {self.name} was asked for, but the model has {len(blocks)} blocks; expected is at most E+H+{len(blocks)}L."
            )
        for block in blocks[: len(blocks) - self.num_layers]:
            block.requires_grad_(False)


def methods_of(names: Iterable[str], *, rank: int, dropout: float = 0.0) -> list[Method]:
    """Methods by their names.

    >>> [method.num_layers for method in methods_of(["full", "e+h", "E+H+4L", "lisa"], rank=8)]
    [0, 0, 4, 2]

    Raises:
        ConfigError: there is none of that name.
    """
    found = []
    for name in names:
        lower = "e+h+2l" if name.lower() == "lisa" else name.lower()
        lisa = _LISA.fullmatch(lower)
        if lisa is not None:
            found.append(Method(name=lower.upper(), kind="lisa", num_layers=int(lisa[1] or 0)))
        elif lower in ("full", "lora", "galore"):
            title = lower if lower == "full" else f"{lower} r{rank}"
            found.append(Method(name=title, kind=lower, rank=rank, dropout=dropout))
        else:
            raise ConfigError(
                f"the method '{name}' was given.{nearest(lower, ['full', 'lora', 'galore', 'lisa', 'e+h'])} Expected are full, lora, "
                "galore, lisa, E+H or E+H+nL with a number n of blocks."
            )
    return found


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's blocks; none where there is no one list of them."""
    try:
        return list(find_blocks(model).values())
    except ConfigError:
        return []


class Adapted(nn.Module):
    """A frozen layer with two matrices beside it that are trained."""

    def __init__(self, layer: nn.Linear | nn.Embedding, *, rank: int, dropout: float) -> None:
        super().__init__()
        self.layer = layer
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        self.down = nn.Parameter(layer.weight.new_zeros(rank, inputs))
        self.up = nn.Parameter(layer.weight.new_zeros(outputs, rank))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scale = 1.0  # alpha / r

    @property
    def weight(self) -> Tensor:
        """The layer's, which a tied head reads."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """The layer, and its change by the adapter."""
        if isinstance(self.layer, nn.Embedding):
            low = functional.embedding(x, self.down.t())
        else:
            low = functional.linear(self.dropout(x), self.down)
        found: Tensor = self.layer(x) + functional.linear(low, self.up) * self.scale
        return found


def adapt(model: nn.Module, *, rank: int, dropout: float) -> None:
    """Put an adapter beside every linear layer and embedding; a head that is tied to an embedding has none of its own."""
    model.requires_grad_(False)
    found = list(_layers(model))
    if not found:
        raise ConfigError(
            f"lora was asked for, but the {type(model).__name__} has no linear layers; choose other --methods."
        )
    for parent, name, layer in found:
        setattr(parent, name, Adapted(layer, rank=rank, dropout=dropout))


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | nn.Embedding]]:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | nn.Embedding):
                yield parent, name, child
