"""An inner problem as a pure step, and how its steps are followed forwards, with and without tangents.

Paper: Shen et al. 2024 (arXiv 2406.14095), section 2.  min over phi of h(phi) = f(theta_T, phi), where
theta_0 = Omega_0(phi), theta_t = Omega_t(theta_{t-1}, phi).  phi -> meta, theta -> state, Omega_0 -> `initial`, Omega_t -> `step` with
the data of step t, f -> `outer`, T -> the number of data.

[Note: the state is everything] A state holds parameters and the optimiser's memory alike: a momentum buffer depends on phi as the
parameters do, and a tangent that leaves it out is the tangent of another training.

[Note: one training, many directions] The data of the steps are part of the problem, drawn before anything is differentiated: all directions
see the same initial weights and the same batches, or they would be directional derivatives of different functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Tree = dict[str, Tensor]


class Inner(Protocol):
    """What is trained.  Both functions are pure, and neither changes a tensor in place."""

    def initial(self, meta: Tree) -> Tree:
        """The state before the first step, which may depend on the meta-parameters."""
        ...

    def step(self, state: Tree, meta: Tree, data: Any) -> Tree:
        """The state after one step on these data."""
        ...


@runtime_checkable
class Pushing(Protocol):
    """An inner problem that knows its own tangents better than `torch.func` does."""

    def push(self, state: Tree, tangents: Tree, meta: Tree, directions: Tree, data: Any) -> tuple[Tree, Tree]:
        """One step of the state and of its tangents [b, ...], along directions [b, ...] of the meta-parameters.

        The tangents that it is given are its own to write into: nobody looks at them again.
        """
        ...

    def advance(self, state: Tree, meta: Tree, data: Any) -> Tree:
        """`step` to rounding, with nothing to be differentiated."""
        ...

    def bytes_per_direction(self, meta: Tree, data: Any) -> int:
        """About how much one direction needs during a push."""
        ...


@runtime_checkable
class Stationary(Protocol):
    """An inner problem that says what its steps minimise: what implicit differentiation asks for."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Which entries of the state are minimised over."""
        ...

    def objective(self, state: Tree, meta: Tree) -> Tensor:
        """The inner loss g(theta, phi)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An inner problem, what each of its steps sees, and how its end is judged."""

    inner: Inner
    data: Sequence[Any]
    outer: Callable[[Tree, Tree], Tensor]

    @property
    def depth(self) -> int:
        """The number of steps, T."""
        return len(self.data)


@torch.no_grad()
def final_state(problem: Problem, meta: Tree) -> Tree:
    """theta_T(phi)."""
    inner = problem.inner
    advance = inner.advance if isinstance(inner, Pushing) else inner.step
    state = inner.initial(meta)
    for data in problem.data:
        state = advance(state, meta, data)
    return state


@torch.no_grad()
def pushed(problem: Problem, meta: Tree, directions: Tree) -> tuple[Tree, Tree]:
    """theta_T and its tangents z_T = (d theta_T / d phi) v along directions v [b, ...]: z_t = A_t z_{t-1} + B_t v.

    What is held at any time is one state and b tangents, whatever the depth.
    """
    inner = problem.inner
    state, tangents = _jvps(inner.initial, (meta,), (directions,))
    tangents = {  # a push may write into them, and these may be the directions themselves, or one 0 seen b times
        key: each.clone(memory_format=torch.contiguous_format) for key, each in tangents.items()
    }
    push = inner.push if isinstance(inner, Pushing) else partial(pushed_by_func, inner)
    for data in problem.data:
        state, tangents = push(state, tangents, meta, directions, data)
    return state, tangents


def pushed_by_func(
    inner: Inner, state: Tree, tangents: Tree, meta: Tree, directions: Tree, data: Any
) -> tuple[Tree, Tree]:
    """One step with tangents of any inner problem: a jvp, mapped over the directions."""
    return _jvps(lambda at, given: inner.step(at, given, data), (state, meta), (tangents, directions))


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
