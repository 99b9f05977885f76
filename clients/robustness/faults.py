"""Clients that fail on purpose, at seeded rates: what a federation has to stand, as part of any experiment.

A client of a round crashes (it raises before it trains), sends NaN, loses its reply after its state was saved, or
answers late.  Whether it does is drawn from (seed, FAULTS, round, partition), one number for each kind, so that the same
clients fail on every engine and a rate does not change who suffers from another.

Where nobody waits for a client, as in process, a delay takes no time: it decides whether the reply still counts.
"""

import time
from dataclasses import replace

import torch

from clients.middleware import ClientMiddleware
from clients.robustness.section import FaultsSection
from fedsign.records import LATE, Failure, TrainReply, TrainRequest
from fedsign.seeding import Purpose, generator

CRASHED = "injected fault: the client crashed"
DROPPED = "injected fault: the reply was lost"
_KINDS = ("crash", "delay", "nan", "drop")  # in the order of their numbers: never change it
_PAST_THE_END_S = 1.0  # nobody listens any more


class Faults(ClientMiddleware):
    """With `waits` a delay is slept through."""

    def __init__(self, rates: FaultsSection, *, seed: int, timeout_s: float, waits: bool) -> None:
        self._rates = {kind: float(getattr(rates, f"{kind}_rate")) for kind in _KINDS}
        self._delay_s, self._seed, self._timeout_s, self._waits = rates.delay_s, seed, timeout_s, waits

    def of(self, round: int, partition: int) -> frozenset[str]:
        """Which faults a client has in a round."""
        drawn = generator(self._seed, Purpose.FAULTS, round=round, partition=partition).random(len(_KINDS))
        return frozenset(kind for kind, number in zip(_KINDS, drawn, strict=True) if number < self._rates[kind])

    def concerns(self, request: TrainRequest) -> bool:
        """Those who have a fault in this round."""
        return bool(self.of(request.round, request.partition))

    def before(self, request: TrainRequest) -> TrainRequest | Failure:
        """Crash."""
        crashes = "crash" in self.of(request.round, request.partition)
        return Failure(partition=request.partition, reason=CRASHED) if crashes else request

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply | Failure:
        """Lose the reply, come late with it, or spoil it."""
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
    """NaN in the first floating tensor, as a diverged training leaves them."""
    name = next(name for name, tensor in reply.tensors.items() if tensor.is_floating_point())
    spoilt = torch.full_like(reply.tensors[name], float("nan"))
    return replace(reply, tensors={**reply.tensors, name: spoilt})
