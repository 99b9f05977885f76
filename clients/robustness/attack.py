"""Malicious clients: a fixed share of the population that sends something else than what it has learnt.

Who is malicious is drawn once from (seed, ATTACK), so that the same clients are on every engine, under every strategy and in every
round; a larger share holds all of a smaller one's.  They train like the others, and then change their update: model less served
model, of parameters, and what travels besides.  BatchNorm's statistics they send as they are: a variance below zero would be
found out at once.

A server that clips updates clips theirs as well.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from clients.middleware import ClientMiddleware
from clients.robustness.section import AttackPart
from fedsign.records import Role, Tensors, TrainReply, TrainRequest
from fedsign.seeding import Purpose, generator

Strength = Annotated[float, Field(gt=0)]
Transform = Callable[[Tensors], Tensors]  # an update into what is sent instead


def none() -> None:
    """Nobody attacks."""


def sign_flip(*, strength: Strength = 1.0) -> Transform:
    """-strength times the update: away from where the client has found less loss."""
    return lambda update: {name: -strength * tensor for name, tensor in update.items()}


def scale(*, strength: Strength = 10.0) -> Transform:
    """strength times the update: one client that counts for many."""
    return lambda update: {name: strength * tensor for name, tensor in update.items()}


class Attack(ClientMiddleware):
    """What malicious clients do; they hold to no privacy of their own."""

    replaces_others = True

    def __init__(self, part: AttackPart, *, seed: int, num_clients: int) -> None:
        self._transform: Transform | None = part.build()
        self._malicious = malicious(part, seed=seed, num_clients=num_clients)

    def concerns(self, request: TrainRequest) -> bool:
        """Those who are malicious, in every round."""
        return request.partition in self._malicious

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply:
        """Send something else."""
        if self._transform is None:
            return reply
        moved = [name for name in reply.tensors if reply.roles[name] is Role.PARAMETER]
        update = self._transform({name: reply.tensors[name] - request.tensors[name] for name in moved})
        sent = {name: (request.tensors[name] + update[name]).to(reply.tensors[name].dtype) for name in moved}
        extra = self._transform(reply.extra) if reply.extra else {}
        return replace(reply, tensors={**reply.tensors, **sent}, extra=extra)


def malicious(part: AttackPart, *, seed: int, num_clients: int) -> frozenset[int]:
    """The clients that attack; none without an attack."""
    if not part.is_chosen:
        return frozenset()
    order = generator(seed, Purpose.ATTACK).permutation(num_clients)
    return frozenset(order[: round(part.fraction * num_clients)].tolist())
