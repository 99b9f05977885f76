"""An inner problem as a pure step, and how its steps are followed forwards, with and without tangents.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 2.  min over phi of h(phi) = f(theta_T, phi), where
theta_0 = Omega_0(phi), theta_t = Omega_t(theta_{t-1}, phi).  phi -> meta, theta -> state, Omega_0 -> `initial`, Omega_t -> `step` with
the data of step t, f -> `outer`, T -> the number of data.

[Note: the state is everything] A state holds parameters and the optimizer's memory alike: a momentum buffer depends on phi as the
parameters do, and a tangent that leaves it out is the tangent of another training.

[Note: one training, many directions] The data of the steps are part of the problem, drawn before anything is differentiated: all directions
see the same initial weights and the same batches, or they would be directional derivatives of different functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]

# Intermediate results that a push by torch.func holds, in units of its state: a guess that errs upwards.
_TANGENTS_OF_A_STEP = 8


class Inner:
    """What is trained.  `initial` and `step` are pure, and neither changes a tensor in place."""

    def initial(self, meta: Tree) -> Tree:
        """The state before the first step, which may depend on the meta-parameters."""
        raise NotImplementedError

    def step(self, state: Tree, meta: Tree, data: Any) -> Tree:
        """The state after one step on these data."""
        raise NotImplementedError

    def push(self, state: Tree, tangents: Tree, meta: Tree, directions: Tree, data: Any) -> tuple[Tree, Tree]:
        """One step of the state and of its tangents [b, ...], along directions [b, ...] of the meta-parameters: a jvp, mapped over them.

        Who knows its tangents better overrides it; those that it is given are its own to write into: nobody looks at them again.
        """
        return _jvps(lambda at, given: self.step(at, given, data), (state, meta), (tangents, directions))

    def advance(self, state: Tree, meta: Tree, data: Any) -> Tree:
        """`step` to rounding, with nothing to be differentiated."""
        return self.step(state, meta, data)

    def bytes_per_direction(self, meta: Tree, data: Sequence[Any]) -> int:
        """About how much one direction needs while it goes through the steps."""
        return _TANGENTS_OF_A_STEP * bytes_of(self.initial(meta)) + bytes_of(meta)

    def objective(self, state: Tree, meta: Tree) -> Tensor:
        """The inner loss g(theta, phi) that steps minimize, for implicit differentiation."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An inner problem, what each of its steps sees, and how its end is judged."""

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

    What is held at any time is one state and b tangents, whatever the depth.
    """
    state, tangents = _jvps(problem.inner.initial, (meta,), (directions,))
    tangents = {  # a push may write into them, and these may be the directions themselves, or one 0 seen b times
        key: each.clone(memory_format=torch.contiguous_format) for key, each in tangents.items()
    }
    for data in problem.data:
        state, tangents = problem.inner.push(state, tangents, meta, directions, data)
    return state, tangents


def _jvps(function: Callable[..., Tree], at: tuple[Tree, ...], tangents: tuple[Tree, ...]) -> tuple[Tree, Tree]:
    """What a function gives, which is the same for all directions, and its tangents, one for each."""

    def along(*directions: Tree) -> Any:
        return torch.func.jvp(function, at, directions)

    once_and_each: Any = (None, 0)  # torch's annotation knows no None here, its documentation does
    mapped: tuple[Tree, Tree] = torch.func.vmap(along, out_dims=once_and_each)(*tangents)
    return mapped


def size_of(tree: Tree) -> int:
    """The number of elements."""
    return sum(each.numel() for each in tree.values())


def unflattened(flat: Tensor, like: Tree) -> Tree:
    """The tree whose elements, all together, are the last dimension of `flat`, [..., N]."""
    parts = flat.split([each.numel() for each in like.values()], dim=-1)
    return {
        key: part.reshape((*flat.shape[:-1], *each.shape)).to(each)
        for (key, each), part in zip(like.items(), parts, strict=True)
    }


def bytes_of(tree: Tree) -> int:
    """What the elements take."""
    return sum(each.numel() * each.element_size() for each in tree.values())


def along(gradient: Tree, tangents: Tree) -> Tensor:
    """The inner products of one tree with b of them, [b]."""
    products = [tangents[key].reshape(len(tangents[key]), -1) @ value.flatten() for key, value in gradient.items()]
    return torch.stack(products).sum(0)
