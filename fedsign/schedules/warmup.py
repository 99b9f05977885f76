"""Linear warm-up, then a decay: what language models are trained with."""

from collections.abc import Callable
from math import cos, pi
from typing import Annotated

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]


def warmup_cosine(round: int, rounds: int, *, warmup: Share = 0.1, final: Share = 0.0) -> float:
    """Up to 1 over the first `warmup` of all rounds (or steps: `client.schedule.per`), then half a cosine down to `final`.

    With w = warmup x rounds, rounded: round/(w + 1) for the first w, so that no round is lost to a rate of 0; then 1.

    >>> [warmup_cosine(r, 12, warmup=0.25) for r in (1, 2, 3, 4)]
    [0.25, 0.5, 0.75, 1.0]
    >>> f"{warmup_cosine(12, 12, warmup=0.25):.4f}"
    '0.0302'
    """
    return _warmed_up(round, rounds, warmup, lambda share: final + (1 - final) * (1 + cos(pi * share)) / 2)


def warmup_linear(round: int, rounds: int, *, warmup: Share = 0.1, final: Share = 0.1) -> float:
    """The same with a straight line down to `final`.

    >>> [warmup_linear(r, 5, warmup=0.2, final=0.0) for r in (1, 2, 3, 5)]
    [0.5, 1.0, 0.75, 0.25]
    """
    return _warmed_up(round, rounds, warmup, lambda share: 1 - (1 - final) * share)


def _warmed_up(count: int, total: int, warmup: float, decay: Callable[[float], float]) -> float:
    """`decay` of the share that is over of what comes after the warm-up."""
    num_warming = min(int(warmup * total + 0.5), total - 1)
    if count <= num_warming:
        return count / (num_warming + 1)
    return decay((count - 1 - num_warming) / (total - num_warming))
