"""Linear warmup followed by a decay, as is usual for language models."""

from collections.abc import Callable
from math import cos, pi
from typing import Annotated

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]


def warmup_cosine(round: int, rounds: int, *, warmup: Share = 0.1, final: Share = 0.0) -> float:
    """Rise linearly to 1 over the share `warmup` of all rounds or steps, then fall on half a cosine to `final`.

    `client.schedule.per` selects rounds or steps.  With w = warmup x rounds, rounded, the first w factors are
    round / (w + 1), so that no round is wasted on a rate of 0.

    >>> [warmup_cosine(r, 12, warmup=0.25) for r in (1, 2, 3, 4)]
    [0.25, 0.5, 0.75, 1.0]
    >>> f"{warmup_cosine(12, 12, warmup=0.25):.4f}"
    '0.0302'
    """
    return _warmed_up(round, rounds, warmup, lambda share: final + (1 - final) * (1 + cos(pi * share)) / 2)


def warmup_linear(round: int, rounds: int, *, warmup: Share = 0.1, final: Share = 0.1) -> float:
    """Rise linearly to 1 over the share `warmup`, then fall linearly to `final`.

    >>> [warmup_linear(r, 5, warmup=0.2, final=0.0) for r in (1, 2, 3, 5)]
    [0.5, 1.0, 0.75, 0.25]
    """
    return _warmed_up(round, rounds, warmup, lambda share: 1 - (1 - final) * share)


def _warmed_up(count: int, total: int, warmup: float, decay: Callable[[float], float]) -> float:
    """The warmup factor, or `decay` of the elapsed share of the rest."""
    # halves round up, where round() goes to the even number; at least one round decays
    num_warming = min(int(warmup * total + 0.5), total - 1)
    if count <= num_warming:
        return count / (num_warming + 1)
    return decay((count - 1 - num_warming) / (total - num_warming))
