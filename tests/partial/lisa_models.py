"""A small model with blocks, its data, and training steps, for tests of LISA and of its alternatives."""

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_BLOCKS = 6
WIDTH, VOCABULARY = 8, 11


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)); blocks differ in size, so that bytes tell which of them is trained."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Embedding, blocks, final norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in range(4, 4 + NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tower(seed: int = 0) -> Tower:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tower()


def tokens(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, step: int) -> None:
    logits = model(tokens(step))
    functional.cross_entropy(logits.flatten(0, 1), tokens(step + 1).flatten()).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with a learning rate that falls, so that a schedule that begins anew would be seen."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sizes_outside(model: nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if not name.startswith("blocks."))


def size_of_block(model: Tower, block: int) -> int:
    return sum(parameter.numel() for parameter in model.blocks[block].parameters())
