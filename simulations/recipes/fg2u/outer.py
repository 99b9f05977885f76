"""Adam on meta-parameters, as the recipes of (FG)²U use it."""

from collections.abc import Callable, Iterator

from fedsign.bilevel.estimate import Hypergradient
from fedsign.bilevel.unroll import Tree
from fedsign.bilevel.updates import Adam, parameters_of


def adam(
    take: Callable[[int, Tree], Hypergradient], begun: Tree, *, steps: int, lr: float
) -> Iterator[tuple[Tree, Hypergradient]]:
    """The meta-parameters after each step, and the hypergradient it took; the rate falls to 0 along a line."""
    state = Adam().begin(begun)
    for step in range(steps):
        found = take(step, parameters_of(state))
        state = Adam().apply(state, found.gradient, lr * (1 - step / steps))
        yield parameters_of(state), found
