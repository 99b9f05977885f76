"""Packed optimizers equal training with masked gradients, with state for nonzero weights only."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from fedsign.config import from_dict
from fedsign.models.cnn import cnn
from fedsign.models.gpt import gpt
from fedsign.optim.base import optimizer_of
from fedsign.parameterization.apply import parameterize, parameterized
from fedsign.parameterization.schemes import SmuPar
from fedsign.sections import OptimizerPart
from fedsign.workload import Workload
from simulations.api import run

VOCABULARY, LENGTH = 40, 12
STEPS = 5


def sparse(model: nn.Module, density: float = 1 / 16) -> nn.Module:
    parameterize(model, SmuPar(base_width=16, density=density, init_std=0.1), seed=3)
    return model


def text_model() -> nn.Module:
    torch.manual_seed(0)
    return sparse(gpt((LENGTH,), VOCABULARY, depth=2, width=64, num_heads=4))


def image_model(channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    model = sparse(cnn((3, 8, 8), 5, channels=(16, 32)), 0.25)
    return model.to(memory_format=torch.channels_last) if channels_last else model  # type: ignore[call-overload]


def trained(model: nn.Module, name: str, *, clip: float = 0.0, **settings: Any) -> torch.optim.Optimizer:
    optimizer = optimizer_of(OptimizerPart(name=name, **settings), model, 0.01, 0.1)
    stream = torch.Generator().manual_seed(1)
    is_text = hasattr(model, "embedding")
    for _ in range(STEPS):
        optimizer.zero_grad()
        if is_text:
            given = torch.randint(VOCABULARY, (3, LENGTH), generator=stream)
            outputs, targets = model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten()
        else:
            outputs = model(torch.randn(6, 3, 8, 8, generator=stream))
            targets = torch.randint(5, (6,), generator=stream)
        nn.functional.cross_entropy(outputs, targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", [text_model, lambda: image_model(False), lambda: image_model(True)])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adamw", {"beta1": 0.9, "beta2": 0.95}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("sgd", {"momentum": 0.0}),
    ],
)
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_packed_training_gives_the_bits_of_masked_dense_training(
    make: Any, name: str, settings: dict[str, Any], clip: float
) -> None:
    dense, packed = make(), make()
    start = {key: tensor.clone() for key, tensor in dense.state_dict().items()}
    trained(dense, name, clip=clip, **settings)
    trained(packed, f"packed_{name}", clip=clip, **settings)
    for key, tensor in dense.state_dict().items():
        assert torch.equal(tensor, packed.state_dict()[key]), key
    moved = [key for key, tensor in start.items() if not torch.equal(tensor, dense.state_dict()[key])]
    made = parameterized(dense)
    assert made is not None and set(made.masks) <= set(moved)


def packed_gradients_norm(model: nn.Module) -> tuple[float, float]:
    made = parameterized(model)
    assert made is not None
    dense = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
    rows = [
        each.grad[made.masks[name].is_present] if name in made.masks else each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
    ]
    return dense.item(), torch.stack([row.norm() for row in rows]).norm().item()


def test_the_norm_that_gradients_are_clipped_by_is_that_of_the_weights_there_are() -> None:
    model = text_model()
    trained(model, "packed_adamw")
    dense, packed = packed_gradients_norm(model)
    assert dense == pytest.approx(packed, rel=1e-6) and dense > 0


@pytest.mark.parametrize(("name", "width"), [("packed_adamw", 8), ("packed_sgd", 4)])
def test_state_takes_its_width_times_the_weights_that_there_are(name: str, width: int) -> None:
    model = text_model()
    optimizer = trained(model, name)
    made = parameterized(model)
    assert made is not None
    there = sum(
        made.masks[key].num if key in made.masks else parameter.numel() for key, parameter in model.named_parameters()
    )
    taken = sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    assert taken == width * there
    assert there < sum(parameter.numel() for parameter in model.parameters()) / 4


def test_weights_that_are_not_there_stay_at_0() -> None:
    for name in ("adamw", "adam", "sgd", "packed_adamw"):
        model = text_model()
        trained(model, name)
        made = parameterized(model)
        assert made is not None and len(made.masks) == 12
        for key, mask in made.masks.items():
            assert not model.get_parameter(key)[~mask.is_present].any(), (name, key)


SMALL = {
    "rounds": 2,
    "callbacks": [],
    "partition": {"num_clients": 4, "alpha": 1.0},
    "server": {"cohort_size": 3},
    "client": {"local_epochs": 1, "lr": 0.01, "clip_norm": 1.0},
    "parameterization": {"name": "smupar", "density": 0.25, "base_width": 64, "init_std": 0.1},
}


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "feddyn", "fedsign", "scaffold", "moon", "fedpan"])
def test_a_federation_of_sparse_clients_keeps_absent_weights_at_0(strategy: str, tmp_path: Any) -> None:
    changes: dict[str, Any] = {"strategy": {"name": strategy}, "results": {"root": str(tmp_path)}}
    if strategy == "scaffold":
        changes["parameterization"] = {"name": "sp", "density": 0.25, "init_std": 0.1}
    done = run({**SMALL, **changes})
    made = parameterized(Workload(from_dict({**SMALL, **changes})).make_model())
    assert made is not None
    (name,) = made.masks
    weights = done.model().get_parameter(name).detach()
    assert not weights[~made.masks[name].is_present].any()
    assert weights[made.masks[name].is_present].all()


@pytest.mark.needs("workers")
@pytest.mark.slow
def test_a_federation_gives_the_same_lines_packed_and_on_two_workers(tmp_path: Any) -> None:
    lines = []
    for name, workers in (("adamw", 1), ("packed_adamw", 1), ("packed_adamw", 2)):
        changes = {
            "client": {**SMALL["client"], "weight_decay": 0.1, "optimizer": {"name": name}},  # type: ignore[dict-item]
            "engine": {"workers": workers},
            "results": {"root": str(tmp_path)},
        }
        lines.append(run({**SMALL, **changes}).rounds)
    assert lines[0] == lines[1] == lines[2]


def test_the_seed_alone_decides_the_masks() -> None:
    random.seed(1)
    one = Workload(from_dict({**SMALL, "seed": 5})).make_model()
    torch.rand(3)
    other = Workload(from_dict({**SMALL, "seed": 5, "rounds": 3})).make_model()
    another = Workload(from_dict({**SMALL, "seed": 6})).make_model()
    masks = [
        parameterized(model).masks["2.weight"].is_present  # type: ignore[union-attr]
        for model in (one, other, another)
    ]
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
