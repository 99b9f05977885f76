"""Fault injection: clients fail on purpose, at seeded rates.

A client may crash before training, send NaN, lose its reply after saving its state, or reply late.  One number per kind
is drawn from (seed, FAULTS, round, partition), so the same clients fail on every engine, and one rate does not affect
who suffers from another.

In process nobody waits for a client, so a delay takes no time and only decides whether the reply still counts.
"""

import time
from dataclasses import replace

import torch

from clients.middleware import ClientMiddleware
from clients.robustness.section import FaultsSection
from fedsign.numerics import is_inexact
from fedsign.records import LATE, Failure, TrainReply, TrainRequest
from fedsign.seeding import Purpose, generator

CRASHED = "injected fault: the client crashed"
DROPPED = "injected fault: the reply was lost"
_KINDS = ("crash", "delay", "nan", "drop")  # in the order of their random numbers; must not change
_PAST_THE_END_S = 1.0  # beyond the timeout, when nobody listens any more


class Faults(ClientMiddleware):
    """Middleware that injects faults; with `waits`, a delay really sleeps."""

    def __init__(self, rates: FaultsSection, *, seed: int, timeout_s: float, waits: bool) -> None:
        self._rates = {kind: float(getattr(rates, f"{kind}_rate")) for kind in _KINDS}
        self._delay_s, self._seed, self._timeout_s, self._waits = rates.delay_s, seed, timeout_s, waits

    def of(self, round: int, partition: int) -> frozenset[str]:
        """A client's faults in a round."""
        drawn = generator(self._seed, Purpose.FAULTS, round=round, partition=partition).random(len(_KINDS))
        return frozenset(kind for kind, number in zip(_KINDS, drawn, strict=True) if number < self._rates[kind])

    def concerns(self, request: TrainRequest) -> bool:
        """Clients with a fault in this round."""
        return bool(self.of(request.round, request.partition))

    def before(self, request: TrainRequest) -> TrainRequest | Failure:
        """Crash before training."""
        crashes = "crash" in self.of(request.round, request.partition)
        return Failure(partition=request.partition, reason=CRASHED) if crashes else request

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply | Failure:
        """Drop, delay, or corrupt the reply."""
        faults = self.of(request.round, request.partition)
        if "drop" in faults:
            return Failure(partition=request.partition, reason=DROPPED)
        if "delay" in faults and self._is_too_late():
            return Failure(partition=request.partition, reason=LATE)
        return _with_nan(reply) if "nan" in faults else reply

    def _is_too_late(self) -> bool:
        if self._waits:
            time.sleep(min(self._delay_s, self._timeout_s + _PAST_THE_END_S))
        return self._delay_s > self._timeout_s


def _with_nan(reply: TrainReply) -> TrainReply:
    """Fill the first floating-point tensor with NaN, as after a divergence."""
    name = next(name for name, tensor in reply.tensors.items() if is_inexact(tensor))
    spoilt = torch.full_like(reply.tensors[name], float("nan"))
    return replace(reply, tensors={**reply.tensors, name: spoilt})
