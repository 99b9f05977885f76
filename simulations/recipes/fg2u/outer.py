"""Adam on meta-parameters, as the recipes of (FG)²U use it."""

from collections.abc import Callable, Iterator

from fedsign.bilevel.estimate import Hypergradient
from fedsign.bilevel.unroll import Tree
from fedsign.bilevel.updates import Adam


def adam(
    take: Callable[[int, Tree], Hypergradient], begun: Tree, *, steps: int, lr: float
) -> Iterator[tuple[Tree, Hypergradient]]:
    """The meta-parameters after each step, and the hypergradient it took; the rate falls to 0 along a line."""
    update, meta = Adam(), dict(begun)
    slots = {name: update.begin(each) for name, each in meta.items()}
    for step in range(steps):
        found = take(step, meta)
        for name, gradient in found.gradient.items():
            meta[name], slots[name] = update.apply(meta[name], slots[name], gradient, lr * (1 - step / steps))
        yield meta, found
