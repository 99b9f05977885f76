"""Exponential decay."""

from typing import Annotated

from pydantic import Field


def exponential(round: int, rounds: int, *, factor: Annotated[float, Field(gt=0, le=1)] = 0.998) -> float:
    """factor^(round - 1).

    >>> exponential(3, 100, factor=0.5)
    0.25
    """
    return factor ** (round - 1)
