"""What all ranks tell each other once per step, in one small all-gather.

A rank's row has the squared norm of its part of the gradient (float64), the digest of its collectives (int64), and for
each trained parameter whether a backward of this step has reached it (one byte each).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsign.errors import DivergedError
from fedsign.sharding.account import HEAD_BYTES, row_bytes
from fedsign.sharding.collectives import Collectives
from fedsign.sharding.layout import Granularity, Grouping


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What all ranks know, bit for bit."""

    norm: float
    used: list[bool]
    """For each parameter, whether it was used on any rank."""


def agree(collectives: Collectives, states: Granularity, *, square: Tensor, used: Sequence[bool]) -> Agreement:
    """Exchange rows; `square` is that of this rank's part of the gradient at the granularity `states`.

    Raises:
        DivergedError: ranks have run different collectives in this step.
    """
    grouping, digest = collectives.grouping, collectives.trail.digest
    own = torch.zeros(row_bytes(len(used)), dtype=torch.uint8, device=square.device)
    own[:8].view(torch.float64).copy_(square)
    own[8:HEAD_BYTES].view(torch.int64).fill_(digest)
    own[HEAD_BYTES : HEAD_BYTES + len(used)] = torch.tensor(used, dtype=torch.uint8)
    table = collectives.from_all(own, of="the step's end").cpu()
    squares = table[:, :8].contiguous().view(torch.float64).flatten()
    digests = table[:, 8:HEAD_BYTES].contiguous().view(torch.int64)
    if bool((digests != digest).any()):
        raise DivergedError(collectives.trail.difference_from_all())
    collectives.trail.settle()
    return Agreement(
        norm=_norm(squares, states, grouping),
        used=table[:, HEAD_BYTES : HEAD_BYTES + len(used)].any(0).tolist(),
    )


def _norm(squares: Tensor, states: Granularity, grouping: Grouping) -> float:
    """The norm of the gradient, each element counted once; from those of the ranks' parts."""
    parts = torch.zeros_like(squares)  # in a fixed order: all ranks then compute bitwise the same norm
    for rank in grouping.holders(states):
        parts[grouping.blocks_of(rank, states).start] = squares[rank]
    return float(parts.sum().sqrt())
