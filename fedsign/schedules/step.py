"""Step decay."""

from typing import Annotated

from pydantic import Field


def step(
    round: int,
    rounds: int,
    *,
    every: Annotated[int, Field(ge=1)] = 50,
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1,
) -> float:
    """factor^k after k x `every` rounds.

    >>> [step(r, 100, every=2) for r in (1, 2, 3)]
    [1.0, 1.0, 0.1]
    """
    return factor ** ((round - 1) // every)
