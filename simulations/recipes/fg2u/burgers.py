"""Burgers' equation u_t + a u u_x = nu u_xx on [-1, 1), periodic, u(x, 0) = -sin(pi x): exact, by SciPy, by a network.

The unknown coefficients are meta-parameters: `advection` = a and `root` = sqrt(nu), so that nu cannot be negative, as
in the public code of (FG)^2U (Shen et al. 2024, arXiv 2406.14095). Both solvers are inner problems of
`fedsign.bilevel.unroll`:

- `Spectral`, a black box: one step is a whole solution by `scipy.integrate.odeint` over the Fourier modes below two
    thirds of the grid's (the 2/3 rule), so that the square of u causes no aliasing. Only the diffusion is stiff, and
    its Jacobian is diagonal in these modes.
- `physics_informed`, a tanh network u(x, t) that Adam trains on the mean squared residual of the equation at random
    points plus the mean squared error of u(x, 0). Its inputs are sin(pi x), cos(pi x) and t, so it is periodic by
    construction.

By the Cole-Hopf transform, u = -(2 nu / a) d/dx ln theta, where theta_t = nu theta_xx starts at exp(-c cos(pi x)),
c = a / (2 pi nu).
"""

import itertools
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import fft
from scipy.integrate import ODEintWarning, odeint
from scipy.special import ive
from torch import Tensor

from fedsign.bilevel.descent import GradientDescent
from fedsign.bilevel.unroll import Inner, Tree
from fedsign.bilevel.updates import Adam, parameters_of

Array = NDArray[np.float64]

_TOLERANCE = 1.4e-8  # of the solver, relative and absolute, as in the authors' code
_MOST_STEPS = 5000  # between two output times
_HEAT_MODES = 400  # of theta; enough for a c of 200


def grid(num_points: int) -> Array:
    """Return the grid on [-1, 1), [num_points]."""
    return -1 + 2 * np.arange(num_points, dtype=np.float64) / num_points


def begin(x: Array) -> Array:
    """Return u(x, 0)."""
    return np.asarray(-np.sin(np.pi * x))


def exact(x: Array, t: Array, *, advection: float, viscosity: float) -> Array:
    """Solve by Cole-Hopf, [times, points]. Theta's Fourier coefficients are Bessel functions I_n(c), scaled by
    exp(-c).
    """
    # exp(-c), the scale of `ive`, cancels in slope / theta; unscaled, I_n(c) overflows from c = 700 on
    n = np.arange(_HEAT_MODES)
    coefficients = ive(n, advection / (2 * np.pi * viscosity)) * (-1.0) ** n * np.where(n, 2, 1)
    decayed = coefficients * np.exp(-((n * np.pi) ** 2) * viscosity * t[:, None])
    theta = decayed @ np.cos(np.pi * np.outer(n, x))
    slope = -(decayed * n * np.pi) @ np.sin(np.pi * np.outer(n, x))
    return np.asarray(-2 * viscosity * slope / theta / advection)


def solution(first: Array, t: Array, *, advection: float, viscosity: float) -> Array:
    """Solve by SciPy from `first` [points] at the first time, [times, points].

    Raises:
        ODEintWarning: SciPy finds no solution.
    """
    num_points = len(first)
    modes = (num_points - 1) // 3 + 1
    wave = np.pi * np.arange(modes)
    # u u_x = (u^2)_x / 2, which is a product with i k in Fourier space
    decay, push = -viscosity * wave**2, -0.5j * advection * wave
    diagonal = np.repeat(decay, 2)[None]  # real and imaginary parts are interleaved

    def slope(state: Array, _: float) -> Array:
        modes_of_u = state.view(np.complex128)
        u = fft.irfft(modes_of_u, num_points)
        return np.asarray((decay * modes_of_u + push * fft.rfft(u * u)[:modes]).view(np.float64))

    with warnings.catch_warnings():
        # odeint only warns when it fails, and returns what it has
        warnings.simplefilter("error", ODEintWarning)
        found = odeint(
            slope,
            fft.rfft(first)[:modes].copy().view(np.float64),
            t,
            # of the diffusion alone: leaving out the smooth advection costs steps, not accuracy
            Dfun=lambda state, _: diagonal,
            ml=0,
            mu=0,
            rtol=_TOLERANCE,
            atol=_TOLERANCE * num_points,  # of modes, which SciPy's FFT does not normalize
            mxstep=_MOST_STEPS,
        )
    return np.asarray(fft.irfft(found.view(np.complex128), num_points, axis=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectral(Inner):
    """The numerical solver as a one-step inner problem. Its data are the times, its state is `u`, [times, points]."""

    x: Array

    def initial(self, meta: Tree) -> Tree:
        """Return u(x, 0), [1, points]."""
        return {"u": torch.from_numpy(begin(self.x))[None]}

    def step(self, state: Tree, meta: Tree, data: Array) -> Tree:
        """Solve for all times. No derivative can pass through: torch refuses numpy() on tensors that require one."""
        advection, root = (float(meta[name].numpy()) for name in ("advection", "root"))
        found = solution(state["u"][-1].numpy(), data, advection=advection, viscosity=root**2)
        return {"u": torch.from_numpy(found)}


def network(widths: tuple[int, ...], generator: torch.Generator) -> Tree:
    """Return weights W0, b0, ... of a network from the three features to u, with variance 1 / inputs and zero
    biases.
    """
    sizes = (3, *widths, 1)
    found: Tree = {}
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        drawn = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64)
        found |= {f"W{index}": drawn / inputs**0.5, f"b{index}": drawn.new_zeros(outputs)}
    return found


def values(weights: Tree, x: Tensor, t: Tensor) -> Tensor:
    """Evaluate u at points [n] and times [n]."""
    carried, last = torch.stack([(torch.pi * x).sin(), (torch.pi * x).cos(), t], 1), _depth(weights) - 1
    for index in range(last):
        carried = (carried @ weights[f"W{index}"] + weights[f"b{index}"]).tanh()
    return (carried @ weights[f"W{last}"] + weights[f"b{last}"])[:, 0]


def derivatives(weights: Tree, x: Tensor, t: Tensor) -> Tensor:
    """Evaluate u, u_x, u_xx and u_t at points [n] and times [n], [4, n], by forward propagation of the derivatives.

    For y = tanh(h): y' = (1 - y^2) h', y'' = (1 - y^2) h'' - 2 y y' h'.
    """
    angle, zero = torch.pi * x, torch.zeros_like(x)
    sine, cosine = angle.sin(), angle.cos()
    # [4, n, features]: the value and its derivatives by x, xx and t, pushed through the layers together
    carried = torch.stack(
        [
            torch.stack([sine, cosine, t], 1),
            torch.pi * torch.stack([cosine, -sine, zero], 1),
            -(torch.pi**2) * torch.stack([sine, cosine, zero], 1),
            torch.stack([zero, zero, torch.ones_like(t)], 1),
        ]
    )
    last = _depth(weights) - 1
    for index in range(last + 1):
        value, by_x, by_xx, by_t = (carried @ weights[f"W{index}"]).unbind()
        value = value + weights[f"b{index}"]
        if index < last:
            value = value.tanh()
            inner = 1 - value * value
            # First: autograd sums gradients in the order of these products, which determines their bits.
            slope = inner * by_x
            by_xx = inner * by_xx - 2 * value * inner * by_x * by_x
            by_x, by_t = slope, inner * by_t
        carried = torch.stack([value, by_x, by_xx, by_t])
    return carried[..., 0]


def _depth(weights: Tree) -> int:
    """Count layers; a training state holds other tensors besides weights."""
    return sum(name.startswith("W") for name in parameters_of(weights))


def residual(weights: Tree, meta: Tree, points: Tensor) -> Tensor:
    """Return the residual u_t + a u u_x - nu u_xx at points [n, (x, t)], [n]."""
    u, u_x, u_xx, u_t = derivatives(weights, points[:, 0], points[:, 1])
    found: Tensor = u_t + meta["advection"] * u * u_x - meta["root"].square() * u_xx
    return found


def physics_informed(start: Tree, *, rate: float, first_weight: float, first_points: int = 64) -> GradientDescent:
    """Return the network's training by Adam as an inner problem; each step's data are residual points [n, (x, t)]."""
    x = torch.from_numpy(grid(first_points))
    first, zero = torch.from_numpy(begin(grid(first_points))), torch.zeros_like(x)

    def loss(weights: Tree, meta: Tree, points: Tensor) -> Tensor:
        missing = values(weights, x, zero) - first
        return residual(weights, meta, points).square().mean() + first_weight * missing.square().mean()

    return GradientDescent(start=lambda meta: start, loss=loss, update=Adam(), rate=lambda meta: rate)
