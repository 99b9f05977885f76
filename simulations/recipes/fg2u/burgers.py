"""Burgers' equation u_t + a u u_x = nu u_xx on [-1, 1), periodic, u(x, 0) = -sin(pi x): exact, by scipy, and by a network.

The coefficients that are sought are meta-parameters: `advection` = a and `root` = sqrt(nu), so that nu is never below 0, as the authors
of (FG)^2U have it (Shen et al. 2024, arXiv 2406.14095, and their public code).  Both solvers are inner problems of
`fedsign.bilevel.unroll`:

- `Spectral`, a black box: one step is a whole solution, `scipy.integrate.odeint` over the Fourier modes below two thirds of the grid's, so
  that the square of u folds nothing back.  The stiff part is the diffusion, whose Jacobian is diagonal there.
- `physics_informed`, a network u(x, t) of tanh that Adam trains on the mean square of the equation's residual at random points and of
  what is missing to u(x, 0).  It sees sin(pi x), cos(pi x) and t, and so is periodic by construction.

By Cole and Hopf u = -(2 nu / a) d/dx ln theta, where theta_t = nu theta_xx begins as exp(-c cos(pi x)), c = a / (2 pi nu).
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

_TOLERANCE = 1.4e-8  # of the solver, relative and absolute: the authors'
_MOST_STEPS = 5000  # between two times
_HEAT_MODES = 400  # of theta: more than a c of 200 needs


def grid(num_points: int) -> Array:
    """Points of [-1, 1), [num_points]."""
    return -1 + 2 * np.arange(num_points, dtype=np.float64) / num_points


def begin(x: Array) -> Array:
    """u(x, 0)."""
    return np.asarray(-np.sin(np.pi * x))


def exact(x: Array, t: Array, *, advection: float, viscosity: float) -> Array:
    """The solution by Cole and Hopf, [times, points]; theta's Fourier coefficients are Bessel functions I_n(c), scaled by exp(-c)."""
    n = np.arange(_HEAT_MODES)
    coefficients = ive(n, advection / (2 * np.pi * viscosity)) * (-1.0) ** n * np.where(n, 2, 1)
    decayed = coefficients * np.exp(-((n * np.pi) ** 2) * viscosity * t[:, None])
    theta = decayed @ np.cos(np.pi * np.outer(n, x))
    slope = -(decayed * n * np.pi) @ np.sin(np.pi * np.outer(n, x))
    return np.asarray(-2 * viscosity * slope / theta / advection)


def solution(first: Array, t: Array, *, advection: float, viscosity: float) -> Array:
    """The solution by scipy, [times, points], that is `first` [points] at the first time; raises ODEintWarning if there is none."""
    num_points = len(first)
    modes = (num_points - 1) // 3 + 1
    wave = np.pi * np.arange(modes)
    decay, push = -viscosity * wave**2, -0.5j * advection * wave
    diagonal = np.repeat(decay, 2)[None]  # real and imaginary parts lie side by side

    def slope(state: Array, _: float) -> Array:
        modes_of_u = state.view(np.complex128)
        u = fft.irfft(modes_of_u, num_points)
        return np.asarray((decay * modes_of_u + push * fft.rfft(u * u)[:modes]).view(np.float64))

    with warnings.catch_warnings():
        warnings.simplefilter("error", ODEintWarning)
        found = odeint(
            slope,
            fft.rfft(first)[:modes].copy().view(np.float64),
            t,
            Dfun=lambda state, _: diagonal,
            ml=0,
            mu=0,
            rtol=_TOLERANCE,
            atol=_TOLERANCE * num_points,  # of modes, which scipy's transform multiplies with the number of points
            mxstep=_MOST_STEPS,
        )
    return np.asarray(fft.irfft(found.view(np.complex128), num_points, axis=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectral(Inner):
    """The numerical solver as an inner problem of one step, whose data are the times; the state is `u`, [times, points]."""

    x: Array

    def initial(self, meta: Tree) -> Tree:
        """u(x, 0), [1, points]."""
        return {"u": torch.from_numpy(begin(self.x))[None]}

    def step(self, state: Tree, meta: Tree, data: Array) -> Tree:
        """The whole solution, through which no derivative goes: torch refuses numpy() where one is asked for."""
        advection, root = (float(meta[name].numpy()) for name in ("advection", "root"))
        found = solution(state["u"][-1].numpy(), data, advection=advection, viscosity=root**2)
        return {"u": torch.from_numpy(found)}


def network(widths: tuple[int, ...], generator: torch.Generator) -> Tree:
    """Weights W0, b0, ... of a network from the three features to u; variance 1 / inputs, no bias."""
    sizes = (3, *widths, 1)
    found: Tree = {}
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        drawn = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64)
        found |= {f"W{index}": drawn / inputs**0.5, f"b{index}": drawn.new_zeros(outputs)}
    return found


def values(weights: Tree, x: Tensor, t: Tensor) -> Tensor:
    """u at points [n] and times [n]."""
    carried, last = torch.stack([(torch.pi * x).sin(), (torch.pi * x).cos(), t], 1), _depth(weights) - 1
    for index in range(last):
        carried = (carried @ weights[f"W{index}"] + weights[f"b{index}"]).tanh()
    return (carried @ weights[f"W{last}"] + weights[f"b{last}"])[:, 0]


def derivatives(weights: Tree, x: Tensor, t: Tensor) -> Tensor:
    """u, u_x, u_xx and u_t at points [n] and times [n], [4, n]: carried through the layers beside the values.

    For y = tanh(h): y' = (1 - y^2) h', y'' = (1 - y^2) h'' - 2 y y' h'.
    """
    angle, zero = torch.pi * x, torch.zeros_like(x)
    sine, cosine = angle.sin(), angle.cos()
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
            slope = inner * by_x  # first: gradients are added up in the order of these products
            by_xx = inner * by_xx - 2 * value * inner * by_x * by_x
            by_x, by_t = slope, inner * by_t
        carried = torch.stack([value, by_x, by_xx, by_t])
    return carried[..., 0]


def _depth(weights: Tree) -> int:
    """Layers; a state of training holds more than weights."""
    return sum(name.startswith("W") for name in parameters_of(weights))


def residual(weights: Tree, meta: Tree, points: Tensor) -> Tensor:
    """u_t + a u u_x - nu u_xx at points [n, (x, t)], [n]."""
    u, u_x, u_xx, u_t = derivatives(weights, points[:, 0], points[:, 1])
    found: Tensor = u_t + meta["advection"] * u * u_x - meta["root"].square() * u_xx
    return found


def physics_informed(begun: Tree, *, rate: float, first_weight: float, first_points: int = 64) -> GradientDescent:
    """The network's training by Adam as an inner problem; a step's data are the residual's points [n, (x, t)]."""
    x = torch.from_numpy(grid(first_points))
    first, zero = torch.from_numpy(begin(grid(first_points))), torch.zeros_like(x)

    def loss(weights: Tree, meta: Tree, points: Tensor) -> Tensor:
        missing = values(weights, x, zero) - first
        return residual(weights, meta, points).square().mean() + first_weight * missing.square().mean()

    return GradientDescent(start=lambda meta: begun, loss=loss, update=Adam(), rate=lambda meta: rate)
