"""The Hessian's trace and eigenvalues equal those of the explicit Hessian; the demonstrations equal their
derivatives.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call, hessian

from fedsign.data.base import Samples
from fedsign.errors import ConfigError
from fedsign.landscape.activations import activation_confusion, relu_demo, softmax_curve
from fedsign.landscape.curvature import Curvature
from fedsign.landscape.vector import Layout
from fedsign.models.mlp import mlp
from fedsign.seeding import Purpose, generator
from fedsign.tasks.classification import Classification
from fedsign.tasks.regression import Regression


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, Samples]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model(torch.randn(50, 4, dtype=torch.float64))  # running statistics
    return model, Samples(features=torch.randn(30, 4, dtype=torch.float64), targets=torch.randint(3, (30,)))


def written_out(model: nn.Module, samples: Samples) -> np.ndarray:
    """[D, D], by torch.func.hessian of the loss of a vector."""
    model.eval()
    layout = Layout.of(model)

    def loss(vector: torch.Tensor) -> torch.Tensor:
        outputs = functional_call(model, layout.tensors(vector), (samples.features,))
        return nn.functional.cross_entropy(outputs, samples.targets)

    found: np.ndarray = hessian(loss)(layout.vector(dict(model.named_parameters()))).numpy()
    return found


@pytest.mark.parametrize("batch", [7, 1024])
def test_products_gradient_trace_and_eigenvalues(small: tuple[nn.Module, Samples], batch: int) -> None:
    model, samples = small
    dense = written_out(model, samples)
    curvature = Curvature(model, Classification(), samples, batch=batch)
    vector = torch.randn(len(dense), dtype=torch.float64)
    assert np.allclose(curvature.product(vector), dense @ vector.numpy(), atol=1e-12)
    model.eval()
    model.zero_grad()
    nn.functional.cross_entropy(model(samples.features), samples.targets).backward()
    written = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])
    assert torch.allclose(curvature.gradient(), written, atol=1e-12)
    low, high = curvature.extreme_eigenvalues(2, tolerance=1e-9)
    values = np.linalg.eigvalsh(dense)
    assert np.allclose(low, values[:2], atol=1e-7) and np.allclose(high, values[-2:], atol=1e-7)
    trace, error = curvature.trace(draws=400)
    assert error is not None
    assert abs(trace - np.trace(dense)) < 4 * error


def test_the_trace_of_a_diagonal_hessian_needs_one_draw() -> None:
    """v^T H v is tr H for every v of signs, if H is diagonal: features with orthogonal columns and a linear model."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False)).double()
    samples = Samples(features=2 * torch.eye(4, dtype=torch.float64), targets=torch.zeros(4, dtype=torch.float64))
    trace, error = Curvature(model, Regression(), samples).trace(draws=1)
    assert trace == pytest.approx(2 * 16 / 4) and error is None


def test_what_cannot_be_is_refused(small: tuple[nn.Module, Samples]) -> None:
    curvature = Curvature(small[0], Classification(), small[1])
    with pytest.raises(ConfigError, match="draws=0"):
        curvature.trace(draws=0)
    with pytest.raises(ConfigError, match="eigenvalues were asked for"):
        curvature.extreme_eigenvalues(10_000)


def softmax_setting() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(3, 5)), rng.normal(size=(3, 5)), rng.normal(size=(60, 5)), rng.integers(3, size=60)


def test_slope_and_curvature_of_the_softmax_demonstration_are_the_losses_derivatives() -> None:
    weights, noise, features, labels = softmax_setting()
    lambdas = np.linspace(-1, 1, 2001)
    found = softmax_curve(weights, noise, features, labels, lambdas)
    step = lambdas[1] - lambdas[0]
    inner = slice(1, -1)
    assert np.allclose(found["slope"][inner], (found["loss"][2:] - found["loss"][:-2]) / (2 * step), atol=1e-5)
    assert np.allclose(
        found["curvature"][inner],
        (found["loss"][2:] - 2 * found["loss"][1:-1] + found["loss"][:-2]) / step**2,
        atol=1e-5,
    )


def test_the_trace_of_the_softmax_demonstration_is_that_of_the_hessian_written_out() -> None:
    weights, noise, features, labels = softmax_setting()
    model = nn.Sequential(nn.Linear(5, 3, bias=False)).double()
    model[0].weight.data = torch.from_numpy(weights + 0.3 * noise)
    samples = Samples(features=torch.from_numpy(features), targets=torch.from_numpy(labels))
    dense = written_out(model, samples)
    found = softmax_curve(weights, noise, features, labels, np.array([0.3]))
    assert found["trace"][0] == pytest.approx(np.trace(dense))
    assert found["curvature"][0] == pytest.approx(noise.reshape(-1) @ dense @ noise.reshape(-1))


def test_the_relu_demonstration_moves_by_the_mean_that_the_normal_distribution_gives() -> None:
    """E sign(a h_i + delta_i) = 2 Phi(a h_i) - 1.

    So E (w + lambda sign w)^T h = a |h|^2 + lambda sum h_i (2 Phi(a h_i) - 1).
    """
    lambdas = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
    before, after = relu_demo(lambdas, draws=20_000)
    assert before.shape == (5, 20_000) and np.array_equal(after, np.maximum(before, 0))
    h = generator(0, Purpose.ANALYSIS, round=4).standard_normal(64)
    drift = h @ (2 * stats.norm.cdf(0.1 * h) - 1)
    for at, drawn in zip(lambdas, before, strict=True):
        error = drawn.std(ddof=1) / len(drawn) ** 0.5
        assert abs(drawn.mean() - (0.1 * h @ h + at * drift)) < 4 * error
    assert drift > 0


def test_activations_of_a_model_and_itself_do_not_change() -> None:
    torch.manual_seed(0)
    model = mlp((8, 8), 10, hidden=(32, 16))
    layout = Layout.of(model)
    theta = layout.vector(model.state_dict())
    features = torch.randn(70, 8, 8)
    same = activation_confusion(model, layout, theta, theta, features, batch=32)
    quiet, active = same.diagonal().tolist()
    assert same.sum() == quiet + active == 70 * 16
    assert quiet > 0 and active > 0
    dead = theta.clone()
    for name, place in layout.slices().items():
        if name.startswith("3."):  # the last hidden layer: weights 0, biases -1
            dead[place] = -1.0 if name.endswith("bias") else 0.0
    silenced = activation_confusion(model, layout, theta, dead, features)
    assert silenced.tolist() == [[quiet, 0], [active, 0]]
    assert model.training
