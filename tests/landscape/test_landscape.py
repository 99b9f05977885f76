"""Evaluating many points at once equals evaluating one after another, and leaves the model unchanged."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsign import plugins
from fedsign.data.base import Samples
from fedsign.errors import ConfigError
from fedsign.landscape.landscape import Landscape, grid
from fedsign.models.cnn import cnn
from fedsign.models.mlp import mlp
from fedsign.tasks.classification import Classification
from fedsign.tasks.regression import Regression


def normed_mlp(shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, num_outputs)
    )


MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8, 8)),
    "mlp with BatchNorm and dropout": (normed_mlp, (1, 8, 8)),
    "cnn with BatchNorm": (cnn, (1, 8, 8)),
    "resnet20": (lambda *shapes: plugins.build("model", "resnet20", {}, *shapes), (3, 8, 8)),
}


def trained_like(name: str, dtype: torch.dtype) -> tuple[nn.Module, Samples, Tensor]:
    """A model whose running statistics are none that data would give, samples, and features for the statistics."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make(shape, 10).to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            module.running_mean += 7.0
    samples = Samples(features=torch.randn(90, *shape, dtype=dtype), targets=torch.randint(10, (90,)))
    return model, samples, torch.randn(70, *shape, dtype=dtype)


def naive(
    model: nn.Module, point: Tensor, samples: Samples, statistics: Tensor | None, batch: int
) -> tuple[float, float]:
    """The paper's protocol, in plain words: set the parameters, clear the statistics, forward, evaluate."""
    model = copy.deepcopy(model)
    start = 0
    for parameter in model.parameters():
        parameter.data = point[start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    model.eval()
    with torch.no_grad():
        if statistics is not None and norms:
            for module in norms:
                module.reset_running_stats()
                module.momentum = None
                module.train()
            for part in statistics.tensor_split(-(-len(statistics) // batch)):
                model(part)
            model.eval()
        outputs = model(samples.features)
        loss = nn.functional.cross_entropy(outputs, samples.targets).item()
        return loss, (outputs.argmax(1) != samples.targets).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_statistics", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_many_points_are_a_naive_loop(name: str, with_statistics: bool, dtype: torch.dtype) -> None:
    model, samples, statistics = trained_like(name, dtype)
    given = statistics if with_statistics else None
    landscape = Landscape(model, Classification(), samples, statistics=given, statistics_batch=30)
    directions = [0.3 * torch.randn(landscape.layout.size, dtype=dtype) for _ in range(2)]
    weights = grid([-0.5, 0.0, 0.4], [0.0, 1.0])
    values = landscape.along(directions, weights)
    assert values.error is not None
    for row, loss, error in zip(weights.to(dtype), values.loss, values.error, strict=True):
        point = landscape.center + row[0] * directions[0] + row[1] * directions[1]
        expected = naive(model, point, samples, given, batch=30)
        assert (loss.item(), error.item()) == pytest.approx(expected, rel=1e-10 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("name", ["cnn with BatchNorm", "resnet20"])
def test_convolutions_in_a_stack_as_on_a_gpu_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples, statistics = trained_like(name, torch.float64)
    alone = Landscape(model, Classification(), samples, statistics=statistics)
    monkeypatch.setattr(Landscape, "_has_slow_convolutions", lambda self: False)
    stacked = Landscape(model, Classification(), samples, statistics=statistics)
    direction = 0.3 * torch.randn(alone.layout.size, dtype=torch.float64)
    found, expected = (each.along([direction], grid([-1.0, 0.0, 0.5])).loss for each in (stacked, alone))
    assert np.allclose(found, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_statistics_matter_where_there_is_batch_norm_and_nowhere_else(name: str) -> None:
    model, samples, statistics = trained_like(name, torch.float64)
    own, anew = (Landscape(model, Classification(), samples, statistics=given) for given in (None, statistics))
    first, second = (each.at(each.center.unsqueeze(0)).loss.item() for each in (own, anew))
    assert (first != second) == ("BatchNorm" in name or name == "resnet20")


@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_as_it_was_to_the_last_bit(name: str) -> None:
    model, samples, statistics = trained_like(name, torch.float32)
    model.train()
    before = copy.deepcopy(model.state_dict())
    momenta = [getattr(module, "momentum", None) for module in model.modules()]
    landscape = Landscape(model, Classification(), samples, statistics=statistics)
    landscape.along([torch.ones(landscape.layout.size)], grid([-1.0, 1.0]))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert model.training and all(module.training for module in model.modules())
    assert momenta == [getattr(module, "momentum", None) for module in model.modules()]


@pytest.mark.parametrize("max_bytes", [1, 2**20, 2**30])
def test_the_budget_of_memory_changes_nothing(max_bytes: int) -> None:
    model, samples, statistics = trained_like("mlp with BatchNorm and dropout", torch.float64)
    landscape = Landscape(model, Classification(), samples, statistics=statistics, max_bytes=max_bytes)
    whole = Landscape(model, Classification(), samples, statistics=statistics)
    direction = torch.randn(landscape.layout.size, dtype=torch.float64)
    found, expected = (each.along([direction], grid([-1.0, 0.0, 0.3, 1.0])) for each in (landscape, whole))
    assert np.allclose(found.loss, expected.loss, rtol=1e-12, atol=0)


def test_points_given_as_such_are_those_along_directions() -> None:
    model, samples, _ = trained_like("mlp", torch.float64)
    landscape = Landscape(model, Classification(), samples)
    direction = torch.randn(landscape.layout.size, dtype=torch.float64)
    points = torch.stack([landscape.center, landscape.center + 0.5 * direction])
    assert np.allclose(landscape.at(points).loss, landscape.along([direction], grid([0.0, 0.5])).loss, rtol=1e-12)


def test_a_model_that_cannot_be_stacked_is_looked_at_point_by_point() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x.flatten(1))
            return out if out.sum().item() > 0 else 2 * out  # vmap cannot look at a number

    torch.manual_seed(0)
    model, samples = Branches(), Samples(features=torch.randn(20, 8, 8), targets=torch.randint(10, (20,)))
    landscape = Landscape(model, Classification(), samples)
    direction = torch.randn(landscape.layout.size)
    for at, loss in zip([-1.0, 1.0], landscape.along([direction], grid([-1.0, 1.0])).loss, strict=True):
        assert loss.item() == pytest.approx(
            naive(model, landscape.center + at * direction, samples, None, 1)[0], rel=1e-6
        )


def test_a_regression_has_no_error() -> None:
    samples = Samples(features=torch.randn(20, 4), targets=torch.randn(20))
    landscape = Landscape(nn.Sequential(nn.Linear(4, 1)), Regression(), samples)
    assert landscape.at(landscape.center.unsqueeze(0)).error is None


def test_no_samples_no_parameters_and_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ConfigError, match="no samples were given"):
        Landscape(nn.Linear(2, 2), Classification(), Samples(features=torch.empty(0, 2), targets=torch.empty(0).long()))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_var[1] = torch.inf
    with pytest.raises(ConfigError, match=r"NaN or infinite values in tensor '1\.running_var'"):
        Landscape(model, Classification(), Samples(features=torch.ones(1, 2), targets=torch.zeros(1).long()))
    with pytest.raises(ConfigError, match="without parameters"):
        Landscape(nn.ReLU(), Classification(), Samples(features=torch.ones(1, 2), targets=torch.zeros(1).long()))
