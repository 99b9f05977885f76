"""The payload of messages to and from ranks: tensors of several kinds, whose names begin with their kind.

To the ranks:   the served `model`, the strategy's `shared` tensors, the client's `state`
From the ranks: the trained `model`, the next `state`, and the `extra` tensors of the reply
"""

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from fedsign.records import Tensors

MODEL, SHARED, STATE, EXTRA = "model", "shared", "state", "extra"
_SEPARATOR = ":"


def payload_key(kind: str, name: str) -> str:
    """The name of a tensor in a payload."""
    return f"{kind}{_SEPARATOR}{name}"


def to_payload(kinds: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    """Tensors of several kinds as one mapping."""
    return {payload_key(kind, name): tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def from_payload(tensors: Mapping[str, Tensor]) -> defaultdict[str, Tensors]:
    """The inverse of `to_payload`.

    >>> import torch
    >>> dict(from_payload(to_payload({"model": {"a:b": torch.zeros(0)}})))
    {'model': {'a:b': tensor([])}}
    """
    kinds: defaultdict[str, Tensors] = defaultdict(dict)
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(_SEPARATOR)
        kinds[kind][rest] = tensor
    return kinds
