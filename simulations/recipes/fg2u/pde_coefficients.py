"""The coefficients of Burgers' equation from 100 values of its solution: a numerical solver or a network as the inner problem.

Paper: Shen et al. 2024 (arXiv 2406.14095), the discovery of coefficients, and the authors' public code.  u_t + a u u_x = nu u_xx
(`simulations.recipes.fg2u.burgers`), a = 1 and nu = 0.1 / pi, from starts drawn by the seed: a from 0.5 to 1.5, sqrt(nu) from 0.1 to 0.4.  The outer loss is the
mean square at 10 times x 10 points of the exact solution, Adam moves a and sqrt(nu) at a rate of 0.03 that falls to 0 along a line, 120 steps for all.

- `quadrature`: scipy's solver on 64 times x 128 points as a black box, differences along the 5 x 5 nodes of a quadrature; `random`: the same along 4
  random directions.
- `fresh`: a network trained from its first weights for 50 steps at each step of the coefficients (the paper's: 100 to 50,000); `continued`: its training goes
  on for 50 steps from where it ended at the last one, 6,000 in all.  The exact reverse gradient goes through the 50 steps.

The hypothesis was fixed before anything was measured (the outer rate and the number of steps were tried with `random` and with `continued` on one seed): the solver ends nearer to the coefficients and to the solution than either network, and is sooner below
the error at which the better network ends than that network is at its end.  Seconds are of this machine; both are measured in turn, seed by seed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from fedsign.bilevel.estimate import Hypergradient
from fedsign.bilevel.forward_gradient import fg2u_zo
from fedsign.bilevel.hypergradients import rgu
from fedsign.bilevel.unroll import Inner, Problem, Tree
from fedsign.bilevel.updates import Adam
from fedsign.report.figures import save, style
from simulations.recipes.base import Figures, Recipe, Threshold
from simulations.recipes.fg2u.burgers import Spectral, exact, grid, network, physics_informed, values
from simulations.recipes.fg2u.figures import draw_discovery

PICTURE = Path("pde-coefficients.svg")
SOLVERS, NETWORKS = ("quadrature", "random"), ("fresh", "continued")

_ADVECTION, _VISCOSITY = 1.0, 0.1 / np.pi
_X, _T = grid(128), np.linspace(0, 1, 64)
_TRUE = torch.from_numpy(exact(_X, _T, advection=_ADVECTION, viscosity=_VISCOSITY))
_SEEN_T, _SEEN_X = (torch.linspace(0, size - 1, 12).long()[1:-1] for size in _TRUE.shape)
_RATE, _WIDTHS, _POINTS, _NETWORK_RATE, _FIRST_WEIGHT = 0.03, (32, 32), 128, 0.01, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...]
    steps: int
    nodes: int
    depth: int


FULL, QUICK = Size(seeds=(0, 1, 2), steps=120, nodes=5, depth=50), Size(seeds=(1,), steps=40, nodes=4, depth=20)

Take = Callable[[Tree], Hypergradient]
"""The hypergradient at some coefficients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """Seconds and error of the coefficients after each step, and the last solution, [times, points]."""

    seconds: list[float]
    errors: list[float]
    coefficients: tuple[float, float]
    u: Tensor

    @property
    def error_of_u(self) -> float:
        """|u - true| / |true|."""
        return float((self.u - _TRUE).norm() / _TRUE.norm())


def start(seed: int) -> Tree:
    """Coefficients to begin with."""
    a, root = torch.rand(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"advection": 0.5 + a, "root": 0.1 + 0.3 * root}


def discover(take: Take, predicted: Callable[[Tree], Tensor], *, begun: Tree, steps: int) -> Discovery:
    """Adam on the coefficients; `predicted` is the solution that a final state stands for."""
    update, meta = Adam(), dict(begun)
    slots = {name: update.begin(each) for name, each in meta.items()}
    seconds, errors, state, at = [], [], Tree(), time.perf_counter()
    for step in range(steps):
        found = take(meta)
        for name, gradient in found.gradient.items():
            meta[name], slots[name] = update.apply(meta[name], slots[name], gradient, _RATE * (1 - step / steps))
        seconds.append(time.perf_counter() - at)
        errors.append(error_of(*coefficients(meta)))
        state = found.state
    return Discovery(seconds=seconds, errors=errors, coefficients=coefficients(meta), u=predicted(state))


def coefficients(meta: Tree) -> tuple[float, float]:
    """a and nu."""
    return float(meta["advection"]), float(meta["root"]) ** 2


def error_of(advection: float, viscosity: float) -> float:
    """|phi - true| / |true|."""
    away = np.hypot(advection - _ADVECTION, viscosity - _VISCOSITY)
    return float(away / np.hypot(_ADVECTION, _VISCOSITY))


def by_solver(name: str, seed: int, size: Size) -> Discovery:
    """With scipy's solver inside."""
    method = (
        fg2u_zo(num_directions=size.nodes**2, directions="quadrature")
        if name == "quadrature"
        else fg2u_zo(num_directions=4)
    )
    problem = solver_problem()
    generator = torch.Generator().manual_seed(seed)
    return discover(
        lambda meta: method(problem, meta, generator=generator),
        lambda state: state["u"],
        begun=start(seed),
        steps=size.steps,
    )


def solver_problem() -> Problem:
    """The black box, judged at the points that are observed."""
    seen = _TRUE[_SEEN_T][:, _SEEN_X]
    return Problem(
        inner=Spectral(x=_X), data=[_T], outer=lambda state, _: (state["u"][_SEEN_T][:, _SEEN_X] - seen).square().mean()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class From:
    """An inner problem that goes on from a state."""

    inner: Inner
    state: Tree

    def initial(self, meta: Tree) -> Tree:
        """The state, which no coefficient changes any more."""
        return self.state

    def step(self, state: Tree, meta: Tree, data: Tensor) -> Tree:
        """As always."""
        return self.inner.step(state, meta, data)


def by_network(name: str, seed: int, size: Size) -> Discovery:
    """With a network inside."""
    generator = torch.Generator().manual_seed(seed)
    training = physics_informed(network(_WIDTHS, generator), rate=_NETWORK_RATE, first_weight=_FIRST_WEIGHT)
    method, t, x = rgu(), torch.from_numpy(_T), torch.from_numpy(_X)
    seen_t, seen_x = (each.flatten() for each in torch.meshgrid(t[_SEEN_T], x[_SEEN_X], indexing="ij"))
    seen = _TRUE[_SEEN_T][:, _SEEN_X].flatten()
    inner: Inner = training

    def take(meta: Tree) -> Hypergradient:
        nonlocal inner
        problem = Problem(
            inner=inner,
            data=[_drawn(generator) for _ in range(size.depth)],
            outer=lambda state, _: (values(state, seen_x, seen_t) - seen).square().mean(),
        )
        found = method(problem, meta, generator=generator)
        if name == "continued":
            inner = From(inner=training, state=found.state)
        return found

    def predicted(state: Tree) -> Tensor:
        all_t, all_x = (each.flatten() for each in torch.meshgrid(t, x, indexing="ij"))
        return values(state, all_x, all_t).reshape(_TRUE.shape)

    return discover(take, predicted, begun=start(seed), steps=size.steps)


def _drawn(generator: torch.Generator) -> Tensor:
    """Points (x, t) for a step of the network."""
    drawn = torch.rand(_POINTS, 2, generator=generator, dtype=torch.float64)
    return torch.stack([2 * drawn[:, 0] - 1, drawn[:, 1]], 1)


@lru_cache
def _measured(quick: bool) -> dict[str, list[Discovery]]:
    """One for each seed, by name."""
    size = QUICK if quick else FULL
    found: dict[str, list[Discovery]] = {name: [] for name in (*SOLVERS, *NETWORKS)}
    for seed in size.seeds:
        for name, of_seeds in found.items():
            of_seeds.append((by_solver if name in SOLVERS else by_network)(name, seed, size))
    return found


def measure(quick: bool) -> Figures:
    """Errors, seconds, and the solver's over the better network's (quick: one seed, 40 steps, 4 x 4 nodes, 20 steps of the network)."""
    found = _measured(quick)
    figures = {
        "start_eps_phi": fmean(error_of(*coefficients(start(seed))) for seed in (QUICK if quick else FULL).seeds)
    }
    for name, of_seeds in found.items():
        figures[f"{name}_eps_phi"] = fmean(each.errors[-1] for each in of_seeds)
        figures[f"{name}_eps_nu"] = fmean(abs(each.coefficients[1] / _VISCOSITY - 1) for each in of_seeds)
        figures[f"{name}_eps_u"] = fmean(each.error_of_u for each in of_seeds)
        figures[f"{name}_s"] = fmean(each.seconds[-1] for each in of_seeds)
    for what in ("eps_phi", "eps_u"):
        figures[f"{what}_ratio"] = figures[f"quadrature_{what}"] / min(figures[f"{name}_{what}"] for name in NETWORKS)
    best = min(NETWORKS, key=lambda name: figures[f"{name}_eps_phi"])
    figures["quadrature_time_ratio"] = fmean(map(_time_ratio, found["quadrature"], found[best]))
    return figures


def _time_ratio(solver: Discovery, other: Discovery) -> float:
    """When the solver's error is below the other's last one for good, over the other's time; infinite where it never is."""
    above = [step for step, error in enumerate(solver.errors) if error > other.errors[-1]]
    at = above[-1] + 1 if above else 0
    return solver.seconds[at] / other.seconds[-1] if at < len(solver.seconds) else float("inf")


def _picture(quick: bool) -> Path:
    found = {name: of_seeds[0] for name, of_seeds in _measured(quick).items()}
    longest = max(each.seconds[-1] for each in found.values())
    with style():
        drawn = draw_discovery(
            {name: ([second / longest for second in each.seconds], each.errors) for name, each in found.items()},
            _X.tolist(),
            {"true": _TRUE[-1].tolist(), **{name: each.u[-1].tolist() for name, each in found.items()}},
        )
        save(drawn, PICTURE, "svg")
    return PICTURE


RECIPE = Recipe(
    name="pde-coefficients",
    claim="With a numerical solver for the inner problem, coefficients of Burgers' equation are found more exactly and sooner than with a network.",
    measure=measure,
    thresholds=(
        Threshold(figure="eps_phi_ratio", bound="at most", value=1.0),
        Threshold(figure="eps_u_ratio", bound="at most", value=1.0),
        Threshold(figure="quadrature_time_ratio", bound="at most", value=1.0),
    ),
    quick_thresholds=(
        Threshold(figure="quadrature_eps_phi", bound="at most", value=0.1),
        Threshold(figure="random_eps_phi", bound="at most", value=0.1),
    ),
    page=_picture,
)
