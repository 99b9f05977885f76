"""Counters: integer buffers that training changes, such as a model's number of steps.

Integers have no mean.  `server.counters` says what clients receive next, given the served value s and the values c_k of
the replies that count:

    copied     s, in every round
    largest    max_k c_k
    summed     s + sum_k (c_k - s): the steps of all clients together

element by element.  A boolean buffer has no sum: `summed` is `largest` there.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsign.errors import RoundError
from fedsign.numerics import is_inexact
from fedsign.records import Tensors
from fedsign.storage.results import Record

BATCHES = "num_batches_tracked"  # BatchNorm's counter, which it reads only without a momentum


def moved(tensors: Mapping[str, Tensor], served: Tensors) -> Tensors:
    """The counters among a client's tensors: integers that are not as served."""
    found = {name: tensor for name, tensor in tensors.items() if not is_inexact(tensor)}
    return {name: tensor for name, tensor in found.items() if bool((tensor != served[name].cpu()).any())}


def counted(rule: str, served: Tensors, replies: Sequence[Tensors]) -> Tensors:
    """The counters that are served next; `replies` hold those that each client has moved.

    Raises:
        RoundError: a sum does not fit into the buffer's type.
    """
    after = {}
    for name in sorted({name for reply in replies for name in reply}):
        own = served[name].to("cpu", torch.int64)
        values = torch.stack([reply.get(name, own).to(torch.int64) for reply in replies])  # [K, ...]
        if rule == "largest" or served[name].dtype == torch.bool:
            after[name] = values.amax(0).to(served[name])
            continue
        after[name] = (own + (values - own).sum(0)).to(served[name])
        exact = own.double() + (values.double() - own.double()).sum(0)  # which does not wrap around
        if not torch.allclose(after[name].cpu().double(), exact, rtol=1e-9):
            raise RoundError(
                f"server.counters=summed gave the buffer '{name}' the value {exact.abs().max().item():.0f}, which does "
                f"not fit into {served[name].dtype}; keep the count as torch.int64, or set server.counters=largest."
            )
    return after


def finding(name: str, *, is_read: bool) -> Record:
    """A counter that the server puts back, as a record of findings.jsonl."""
    what = "the model reads the integer buffer" if is_read else "training changes the integer buffer"
    which = "which training changes, " if is_read else ""
    return {
        "rule": "copied-counter",
        "source": "run",
        "message": f"{what} '{name}', {which}but integers are not averaged: every client starts each round from the "
        "first value",
        "remedy": "set server.counters=largest or summed, or keep what the model reads in a floating-point buffer, "
        "which is averaged",
    }
