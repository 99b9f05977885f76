"""Burgers' equation: numerical against exact solution, network derivatives against autograd, coefficient gradients."""

import numpy as np
import pytest
import torch
from scipy.integrate import ODEintWarning
from torch import Tensor

from fedsign.bilevel.forward_gradient import fg2u_zo
from fedsign.bilevel.hypergradients import rgu
from fedsign.bilevel.unroll import Problem, Tree, final_state
from simulations.recipes.fg2u.burgers import (
    Array,
    Spectral,
    begin,
    derivatives,
    exact,
    grid,
    network,
    physics_informed,
    residual,
    solution,
    values,
)

TIMES = np.linspace(0, 1, 11)


def by_cole_and_hopf(x: Array, t: float, *, advection: float, viscosity: float) -> Array:
    """Solve by Cole-Hopf integrals over the heat kernel, with Gauss-Hermite quadrature.

    u = -int sin(pi y) F(y) e^(-s^2) ds / int F(y) e^(-s^2) ds, y = x - sqrt(4 nu t) s, F(y) = exp(-a cos(pi y) / (2 pi
    nu)); Basdevant et al. 1986, with a = 1.
    """
    nodes, weights = np.polynomial.hermite.hermgauss(100)
    y = x[:, None] - np.sqrt(4 * viscosity * t) * nodes
    kernel = weights * np.exp(-advection * np.cos(np.pi * y) / (2 * np.pi * viscosity))
    return np.asarray(-(np.sin(np.pi * y) * kernel).sum(1) / kernel.sum(1))


def coefficients(advection: float = 1.2, root: float = 0.2) -> Tree:
    return {"advection": torch.tensor(advection, dtype=torch.float64), "root": torch.tensor(root, dtype=torch.float64)}


@pytest.mark.parametrize(("advection", "viscosity"), [(1.0, 0.1 / np.pi), (1.5, 0.05), (0.6, 0.16)])
def test_the_series_is_the_integral_of_cole_and_hopf(advection: float, viscosity: float) -> None:
    x = grid(50)
    found = exact(x, TIMES, advection=advection, viscosity=viscosity)
    np.testing.assert_allclose(found[0], begin(x), atol=1e-9)
    for row, t in zip(found[1:], TIMES[1:], strict=True):
        expected = by_cole_and_hopf(x, t, advection=advection, viscosity=viscosity)
        np.testing.assert_allclose(row, expected, atol=1e-9)


@pytest.mark.parametrize(("advection", "viscosity"), [(1.0, 0.1 / np.pi), (1.5, 0.05), (0.6, 0.16), (-1.0, 0.1)])
def test_the_numerical_solution_is_the_exact_one(advection: float, viscosity: float) -> None:
    x = grid(128)
    found = solution(begin(x), TIMES, advection=advection, viscosity=viscosity)
    np.testing.assert_allclose(found, exact(x, TIMES, advection=advection, viscosity=viscosity), atol=2e-6)


def test_more_points_are_exponentially_better() -> None:
    """Until the tolerance of the integration in time, 1.4e-8 a step."""
    errors = []
    for num_points in (32, 64, 128):
        x = grid(num_points)
        found = solution(begin(x), TIMES, advection=1.0, viscosity=0.1 / np.pi)
        errors.append(np.abs(found - exact(x, TIMES, advection=1.0, viscosity=0.1 / np.pi)).max())
    assert errors[0] > 30 * errors[1] > 900 * errors[2]


def test_the_mean_is_kept_and_energy_lost_to_viscosity() -> None:
    """d/dt int u = 0 and d/dt int u^2 / 2 = -nu int u_x^2, for an asymmetric start.

    Sums over the grid are exact integrals of a few modes.
    """
    x = grid(128)
    first = 0.3 + np.sin(np.pi * x) + 0.5 * np.cos(2 * np.pi * x + 0.4)
    times = np.linspace(0, 0.5, 2001)
    found = solution(first, times, advection=1.3, viscosity=0.05)
    np.testing.assert_allclose(found.mean(1), 0.3, rtol=1e-12)
    slopes = np.fft.irfft(1j * np.pi * np.arange(65) * np.fft.rfft(found), axis=1)
    lost = np.trapezoid(0.05 * (slopes**2).mean(1), times)
    energy = (found**2).mean(1) / 2
    assert lost > 0.1 * energy[0]
    assert energy[0] - energy[-1] == pytest.approx(lost, rel=1e-5)


def test_what_has_no_solution_is_said() -> None:
    with pytest.raises(ODEintWarning):
        solution(begin(grid(128)), TIMES, advection=1.0, viscosity=-1.0)


def observed(advection: float = 1.0, viscosity: float = 0.1 / np.pi) -> Problem:
    x = grid(128)
    seen = torch.from_numpy(exact(x, TIMES, advection=advection, viscosity=viscosity))
    return Problem(inner=Spectral(x=x), data=[TIMES], outer=lambda state, _: (state["u"] - seen).square().mean())


def second_moment(nodes: int) -> float:
    """What a quadrature multiplies the gradient with: sum_i w_i x_i^2 on an axis."""
    x = np.linspace(-5, 5, nodes)
    return float(np.average(x**2, weights=np.exp(-(x**2) / 2)))


@pytest.mark.parametrize("count", [16, 49, 144])
def test_the_gradient_of_the_black_box_is_that_of_central_differences(count: int) -> None:
    """Up to the scale of a coarse quadrature; differences of 1e-4 turn the solver's tolerance of 1.4e-8 into about
    1e-4.
    """
    problem, meta = observed(), coefficients()
    found = fg2u_zo(num_directions=count, directions="quadrature")(problem, meta, generator=torch.Generator())
    scale = second_moment(round(count**0.5))

    def value(**moved: float) -> float:
        at = coefficients(**{name: float(meta[name]) + moved.get(name, 0.0) for name in meta})
        return float(problem.outer(final_state(problem, at), at))

    for name, gradient in found.gradient.items():
        central = (value(**{name: 1e-3}) - value(**{name: -1e-3})) / 2e-3
        assert float(gradient) / scale == pytest.approx(central, rel=1e-3)


def test_random_directions_find_the_same_gradient_on_the_mean() -> None:
    """All four Rademacher vectors of two coefficients, by symmetry: (g.v) v is the same for v and -v, and the mean is
    g.
    """
    problem, meta = observed(), coefficients()
    found = [
        fg2u_zo(num_directions=1)(problem, meta, generator=torch.Generator().manual_seed(seed)).gradient
        for seed in range(8)
    ]
    kinds: dict[bool, Tree] = {float(each["advection"] * each["root"]) > 0: each for each in found}
    assert len(kinds) == 2
    exact_mean = fg2u_zo(num_directions=49, directions="quadrature")(problem, meta, generator=torch.Generator())
    for name in meta:
        mean = (kinds[True][name] + kinds[False][name]) / 2
        assert float(mean) == pytest.approx(float(exact_mean.gradient[name]) / second_moment(7), rel=1e-2)


def test_no_derivative_goes_through_the_black_box() -> None:
    with pytest.raises(RuntimeError, match="requires grad"):
        rgu()(observed(), coefficients(), generator=torch.Generator())


def test_a_networks_derivatives_are_autograds() -> None:
    weights = network((7, 5), torch.Generator().manual_seed(0))
    points = torch.rand(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def u(x: Tensor, t: Tensor) -> Tensor:
        return values(weights, x[None], t[None])[0]

    u_x, u_t = torch.func.grad(u, 0), torch.func.grad(u, 1)
    expected = [torch.func.vmap(each)(*points.T) for each in (u, u_x, torch.func.grad(u_x, 0), u_t)]
    torch.testing.assert_close(derivatives(weights, *points.T), torch.stack(expected))
    value, by_x, by_xx, by_t = expected
    meta = coefficients()
    left = by_t + 1.2 * value * by_x - 0.04 * by_xx
    torch.testing.assert_close(residual(weights, meta, points), left)
    torch.testing.assert_close(values(weights, points[:, 0] + 2, points[:, 1]), value)  # periodic


def test_the_gradient_through_a_networks_training_is_that_of_central_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    inner = physics_informed(network((6,), generator), rate=0.01, first_weight=10.0)
    points = [torch.rand(20, 2, generator=generator, dtype=torch.float64) for _ in range(8)]
    probe = torch.rand(9, 2, generator=generator, dtype=torch.float64)
    problem = Problem(
        inner=inner, data=points, outer=lambda state, _: values(state, probe[:, 0], probe[:, 1]).square().mean()
    )
    meta = coefficients()
    found = rgu()(problem, meta, generator=generator).gradient
    for name in meta:
        ends = [{**meta, name: meta[name] + move} for move in (1e-5, -1e-5)]
        up, down = (float(problem.outer(final_state(problem, at), at)) for at in ends)
        assert float(found[name]) == pytest.approx((up - down) / 2e-5, rel=1e-6, abs=1e-9)


def test_training_brings_the_network_to_the_solution() -> None:
    generator = torch.Generator().manual_seed(0)
    inner = physics_informed(network((20, 20), generator), rate=0.01, first_weight=10.0)
    x, t = grid(32), np.linspace(0, 1, 16)
    true = torch.from_numpy(exact(x, t, advection=1.2, viscosity=0.16))
    drawn = torch.rand(400, 128, 2, generator=generator, dtype=torch.float64) * torch.tensor([2.0, 1.0])
    problem = Problem(
        inner=inner, data=list(drawn - torch.tensor([1.0, 0.0])), outer=lambda state, _: state["W0"].sum()
    )
    every_t, every_x = (
        each.flatten() for each in torch.meshgrid(torch.from_numpy(t), torch.from_numpy(x), indexing="ij")
    )
    begun, trained = (
        values(state, every_x, every_t).reshape(true.shape)
        for state in (inner.initial(coefficients()), final_state(problem, coefficients(1.2, 0.4)))
    )
    assert (begun - true).norm() > 0.8 * true.norm()
    assert (trained - true).norm() < 0.1 * true.norm()
