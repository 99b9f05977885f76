"""A model on the meta device loads its values from a file, unit by unit; no rank ever has all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsign.errors import ConfigError
from fedsign.memory.live import allocated
from fedsign.sharding.layout import Grouping
from fedsign.sharding.paro import Sharded
from fedsign.sharding.strategy import STRATEGIES
from tests.distributed.ranks import on_ranks

WIDTH, LAYERS, UNITS = 64, 2, 12
UNIT_BYTES = 4 * LAYERS * WIDTH * WIDTH
GROUPING = Grouping(groups=2, per_group=2)


class Tied(nn.Module):
    """Blocks, one frozen, between an embedding and a head that share their weights and a buffer, the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))) for _ in range(UNITS)
        )
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(3.0))
        self.head.register_buffer("scale", self.scale)
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x)
        return found


def sharded(model: nn.Module, strategy: str, **settings: Any) -> Sharded:
    return Sharded(
        model, lambda named: torch.optim.AdamW(named, lr=1e-2), grouping=GROUPING, strategy=strategy, **settings
    )


def stepped(engine: Sharded) -> dict[str, Tensor]:
    """After a step."""
    engine(torch.arange(10)).square().mean().backward()
    engine.step()
    return engine.full_state_dict()


def on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def compared(path: Path) -> dict[str, bool]:
    """Of each strategy, whether the same step follows as from a model with values, to the last bit."""
    found = {}
    for name in STRATEGIES:
        torch.manual_seed(0)
        expected = stepped(sharded(Tied(), name))
        here = sharded(on_meta(), name, weights=path)
        assert here.model.head.weight is here.model.embedding.weight and here.model.head.scale is here.model.scale
        other = stepped(here)
        found[name] = expected.keys() == other.keys() and all(expected[key].equal(other[key]) for key in expected)
    return found


def taken(path: Path) -> dict[str, tuple[int, int]]:
    """What loading takes at most, and what a rank keeps of it."""
    found = {}
    for name in ("GGG", "IIG", "III"):
        model = on_meta()
        with allocated(torch.device("cpu")) as bytes_taken:
            engine = sharded(model, name, weights=path)
        found[name] = bytes_taken.peak_bytes, engine.kept_bytes()
    return found


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        sharded(on_meta(), "IIG", weights=path)
    return str(caught.value)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """In two files of a folder."""
    torch.manual_seed(0)
    values = {name: tensor.clone() for name, tensor in Tied().state_dict().items() if not name.startswith("head.")}
    names = list(values)
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({name: values[name] for name in names[:7]}, folder / "model-1.safetensors")
    save_file({name: values[name] for name in names[7:]}, folder / "model-2.safetensors")
    return folder


@pytest.mark.slow
def test_a_model_on_the_meta_device_trains_as_one_with_the_same_values(stored: Path, tmp_path: Path) -> None:
    for rank in on_ranks(4, compared, stored, folder=tmp_path):
        assert rank == dict.fromkeys(STRATEGIES, True)


def test_loading_takes_a_ranks_share_and_a_unit(stored: Path, tmp_path: Path) -> None:
    """On rank 0 the files are also memory-mapped. The allocator's events count that, but the system can reclaim it."""
    for rank in on_ranks(4, taken, stored, folder=tmp_path)[1:]:
        for name, (peak, kept) in rank.items():
            assert kept < peak <= kept + 1.01 * UNIT_BYTES, name
        assert rank["GGG"][0] < 0.6 * UNITS * UNIT_BYTES  # of the parameters alone


def test_weights_of_another_model_are_refused_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"embedding.weight": torch.zeros(3, 2)}, path)
    for said in on_ranks(4, refused, path, folder=tmp_path):
        assert "has 'embedding.weight' as [3, 2], but the model has it as [10, 64]" in said
    for said in on_ranks(4, refused, tmp_path / "nothing", folder=tmp_path / "2"):
        assert "expected a .safetensors file, or a folder with some" in said


def no_weights() -> str:
    with pytest.raises(ConfigError) as caught:
        sharded(on_meta(), "IIG")
    return str(caught.value)


def test_without_weights_a_model_without_values_is_refused(tmp_path: Path) -> None:
    for said in on_ranks(4, no_weights, folder=tmp_path):
        assert "is on the meta device, where tensors have no values" in said
