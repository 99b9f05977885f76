"""Cosine decay (Loshchilov and Hutter 2017, arXiv 1608.03983, Eq. 5, without restarts)."""

from math import cos, pi
from typing import Annotated

from pydantic import Field


def cosine(round: int, rounds: int, *, final: Annotated[float, Field(ge=0, le=1)] = 0.0) -> float:
    """final + (1 - final) (1 + cos(pi (round - 1) / rounds)) / 2: 1 in the first round, `final` after the last.

    A run resumed with more rounds continues on the longer curve.

    >>> cosine(1, 10), f"{cosine(6, 10):.6f}"
    (1.0, '0.500000')
    """
    return final + (1 - final) * (1 + cos(pi * (round - 1) / rounds)) / 2
