"""Simulated attackers: a fixed share of the population that sends manipulated updates.

The malicious clients are drawn once from (seed, ATTACK), so they are the same on every engine, under every strategy,
and in every round; a larger share includes a smaller one.  They train like the others, then change their update: the
parameters relative to the served model, and auxiliary tensors.  They do not change BatchNorm's statistics, since a
negative variance would be obvious.

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
Transform = Callable[[Tensors], Tensors]  # update -> manipulated update


def none() -> None:
    """No attack."""


def sign_flip(*, strength: Strength = 1.0) -> Transform:
    """Send -strength times the update, which increases the loss."""
    return lambda update: {name: -strength * tensor for name, tensor in update.items()}


def scale(*, strength: Strength = 10.0) -> Transform:
    """Send strength times the update, so that one client counts for many."""
    return lambda update: {name: strength * tensor for name, tensor in update.items()}


class Attack(ClientMiddleware):
    """Middleware that applies the attack; malicious clients skip other middleware, such as local privacy."""

    replaces_others = True

    def __init__(self, part: AttackPart, *, seed: int, num_clients: int) -> None:
        self._transform: Transform | None = part.build()
        self._malicious = malicious(part, seed=seed, num_clients=num_clients)

    def concerns(self, request: TrainRequest) -> bool:
        """The malicious clients, in every round."""
        return request.partition in self._malicious

    def after(self, request: TrainRequest, reply: TrainReply) -> TrainReply:
        """Manipulate the update."""
        if self._transform is None:
            return reply
        moved = [name for name in reply.tensors if reply.roles[name] is Role.PARAMETER]
        update = self._transform({name: reply.tensors[name] - request.tensors[name] for name in moved})
        sent = {name: (request.tensors[name] + update[name]).to(reply.tensors[name].dtype) for name in moved}
        extra = self._transform(reply.extra) if reply.extra else {}
        return replace(reply, tensors={**reply.tensors, **sent}, extra=extra)


def malicious(part: AttackPart, *, seed: int, num_clients: int) -> frozenset[int]:
    """The malicious clients; empty without an attack."""
    if not part.is_chosen:
        return frozenset()
    order = generator(seed, Purpose.ATTACK).permutation(num_clients)
    return frozenset(order[: round(part.fraction * num_clients)].tolist())
