"""An inner problem as a pure step function, unrolled forward with and without tangents.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 2.  min over phi of h(phi) = f(theta_T, phi), where
theta_0 = Omega_0(phi), theta_t = Omega_t(theta_{t-1}, phi).  phi -> meta, theta -> state, Omega_0 -> `initial`,
Omega_t -> `step` with the data of step t, f -> `outer`, T -> len(data).

[Note: the state is everything] A state holds parameters and optimizer state alike.  A momentum buffer depends on phi
just as the parameters do; a tangent without it belongs to a different training.

[Note: one training, many directions] The data of all steps are part of the problem, drawn in advance.  All directions
must see the same initial weights and batches, or they would be directional derivatives of different functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]

# Intermediate results of a push by torch.func, in units of the state; an overestimate.
_TANGENTS_OF_A_STEP = 8


class Inner:
    """The inner problem.  `initial` and `step` are pure: they never modify a tensor in place."""

    def initial(self, meta: Tree) -> Tree:
        """The state before the first step, which may depend on the meta-parameters."""
        raise NotImplementedError

    def step(self, state: Tree, meta: Tree, data: Any) -> Tree:
        """The state after one step with these data."""
        raise NotImplementedError

    def push(self, state: Tree, tangents: Tree, meta: Tree, directions: Tree, data: Any) -> tuple[Tree, Tree]:
        """One step of the state and of its tangents [b, ...] along directions [b, ...], by a vmapped jvp.

        Subclasses may override it with hand-written tangents.  They own `tangents` and may overwrite them.
        """
        return _jvps(lambda at, given: self.step(at, given, data), (state, meta), (tangents, directions))

    def advance(self, state: Tree, meta: Tree, data: Any) -> Tree:
        """`step` without differentiation; may differ from it by rounding."""
        return self.step(state, meta, data)

    def bytes_per_direction(self, meta: Tree, data: Sequence[Any]) -> int:
        """Approximate memory of one direction during a step."""
        return _TANGENTS_OF_A_STEP * bytes_of(self.initial(meta)) + bytes_of(meta)

    def objective(self, state: Tree, meta: Tree) -> Tensor:
        """The inner loss g(theta, phi) that the steps minimize; needed by implicit methods only."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An inner problem, the data of its steps, and the outer loss of its final state."""

    inner: Inner
    data: Sequence[Any]
    outer: Callable[[Tree, Tree], Tensor]


@torch.no_grad()
def final_state(problem: Problem, meta: Tree) -> Tree:
    """theta_T(phi)."""
    state = problem.inner.initial(meta)
    for data in problem.data:
        state = problem.inner.advance(state, meta, data)
    return state


@torch.no_grad()
def pushed(problem: Problem, meta: Tree, directions: Tree) -> tuple[Tree, Tree]:
    """theta_T and its tangents z_T = (d theta_T / d phi) v along directions v [b, ...]: z_t = A_t z_{t-1} + B_t v.

    Memory holds one state and b tangents at any time, whatever the depth.
    """
    state, tangents = _jvps(problem.inner.initial, (meta,), (directions,))
    tangents = {  # push may overwrite them, but these may alias the directions, or be an expanded 0
        key: each.clone(memory_format=torch.contiguous_format) for key, each in tangents.items()
    }
    for data in problem.data:
        state, tangents = problem.inner.push(state, tangents, meta, directions, data)
    return state, tangents


def _jvps(function: Callable[..., Tree], at: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> tuple[Tree, Tree]:
    """A function's value, shared by all directions, and its tangent along each."""

    def along(*directions: Tree) -> Any:
        return torch.func.jvp(function, at, directions)

    # None: the value depends on no direction, so vmap returns it once
    once_and_each: Any = (None, 0)  # documented by torch, but missing in its annotation
    mapped: tuple[Tree, Tree] = torch.func.vmap(along, out_dims=once_and_each)(*tangents)
    return mapped


def size_of(tree: Tree) -> int:
    """Number of elements."""
    return sum(each.numel() for each in tree.values())


def unflattened(flat: Tensor, like: Tree) -> Tree:
    """A tree with the shapes of `like` from the concatenated elements [..., N]."""
    parts = flat.split([each.numel() for each in like.values()], dim=-1)
    return {
        key: part.reshape((*flat.shape[:-1], *each.shape)).to(each)
        for (key, each), part in zip(like.items(), parts, strict=True)
    }


def bytes_of(tree: Tree) -> int:
    """Memory of all elements."""
    return sum(each.numel() * each.element_size() for each in tree.values())


def along(gradient: Tree, tangents: Tree) -> Tensor:
    """Inner products of one tree with b trees, [b]."""
    products = [tangents[key].reshape(len(tangents[key]), -1) @ value.flatten() for key, value in gradient.items()]
    return torch.stack(products).sum(0)
