"""Adam on meta-parameters, shared by the recipes of (FG)²U."""

from collections.abc import Callable, Iterator

from fedsign.bilevel.estimate import Hypergradient
from fedsign.bilevel.unroll import Tree
from fedsign.bilevel.updates import Adam, parameters_of


def adam(
    take: Callable[[int, Tree], Hypergradient], start: Tree, *, steps: int, lr: float
) -> Iterator[tuple[Tree, Hypergradient]]:
    """Yield the meta-parameters after each step, and its hypergradient; the rate decays linearly to 0."""
    state = Adam().begin(start)
    for step in range(steps):
        found = take(step, parameters_of(state))
        state = Adam().apply(state, found.gradient, lr * (1 - step / steps))
        yield parameters_of(state), found
