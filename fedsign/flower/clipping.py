"""Client-side clipping of updates, for Flower's client-side differential privacy.

`DifferentialPrivacyClientSide...` writes the clipping norm C into the request, and expects one of Flower's client mods
to apply it.  Those refuse messages with more than one config record, which ours have.  So our client does their work
on the parameters: update * min(1, C / ||update||), and the metric `norm_bit` (1: clipped) for the adaptive strategy.
"""

from typing import cast

import torch
from flwr.app import ConfigRecord, Message, MetricRecord

from fedsign.flower import wire
from fedsign.numerics import as_real
from fedsign.records import Role

CLIPPING_NORM_KEY, NORM_BIT_KEY = "clipping_norm", "norm_bit"  # Flower's names


def honor(reply: Message, request: Message) -> Message:
    """Clip the reply if the request asks for it."""
    norms = [
        record[CLIPPING_NORM_KEY]
        for record in wire.of_kind(request.content, ConfigRecord).values()
        if CLIPPING_NORM_KEY in record
    ]
    if not norms:
        return reply
    clipping_norm = float(cast(float, norms[0]))
    before, trained = wire.unpack_request(request).tensors, wire.unpack_reply(reply)
    after = trained.tensors
    parameters = [name for name, role in trained.roles.items() if role == Role.PARAMETER]
    # float64: a sum of 10^8 squares loses digits in float32
    squares = [
        torch.linalg.vector_norm(as_real(after[name] - before[name]), dtype=torch.float64).square()
        for name in parameters
    ]
    norm = torch.stack(squares).sum().sqrt().item()
    if norm > clipping_norm:
        for name in parameters:
            after[name] = before[name] + (after[name] - before[name]) * (clipping_norm / norm)
    wire.replace_arrays(reply, after)
    wire.of_kind(reply.content, MetricRecord)[wire.METRICS][NORM_BIT_KEY] = int(norm > clipping_norm)
    return reply
