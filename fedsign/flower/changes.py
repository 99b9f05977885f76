"""Requests that leave out what the client has: the tensors that have changed, and for each of the model's its digest.

Who has what is the server's account ([Note: versions per tensor] in fedsign.parts).  What is left out is named by a digest of
its values, so that a client can complete the model from whatever it has kept and never takes one tensor for another, after
however many resumes, lost replies and exchanged disks.  One that has not got what it is believed to have answers with
an IncompleteModelError, and is sent everything in the same round.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from torch import Tensor

from fedsign import codec
from fedsign.errors import IncompleteModelError
from fedsign.flower import wire
from fedsign.flower.array import plain_array, to_tensors

_MODEL = "model"  # in the route: name -> digest, in the model's order
_DIGEST_BYTES = 16


class PlainArrays:
    """Records of plain arrays for the messages of a round; an array is made once, when the first message needs it."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, str], tuple[Array, str]] = {}
        # the records that they were made of are kept too, so that an id stays its own
        self._records: dict[tuple[int, tuple[str, ...]], tuple[ArrayRecord, ArrayRecord, dict[str, str]]] = {}

    def of(self, record: ArrayRecord, names: Iterable[str] | None = None) -> tuple[ArrayRecord, dict[str, str]]:
        """A record, or the named arrays of it, ready for the wire, and the encoding of each."""
        chosen = tuple(record if names is None else names)
        if (id(record), chosen) not in self._records:
            made = {name: self._made(record, name) for name in chosen}
            plain = ArrayRecord()
            for name, (array, _) in made.items():
                plain[name] = array
            encodings = {name: encoding for name, (_, encoding) in made.items()}
            self._records[id(record), chosen] = record, plain, encodings
        _, plain, encodings = self._records[id(record), chosen]
        return plain, encodings

    def _made(self, record: ArrayRecord, name: str) -> tuple[Array, str]:
        if (id(record), name) not in self._arrays:
            self._arrays[id(record), name] = plain_array(record[name])
        return self._arrays[id(record), name]


@dataclass(frozen=True, slots=True)
class _Known:
    """A digest, and the tensor that it is of: while that is held, its memory is nobody else's."""

    tensor: Tensor
    version: int
    digest: str

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is the same memory, which nobody has written to."""
        mine = self.tensor
        return (
            (mine.data_ptr(), mine.shape, mine.stride(), mine.dtype)
            == (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        ) and self.version == tensor._version


class Digests:
    """Of the models that are sent; computed anew for what is not the tensor of the time before."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def of(self, record: ArrayRecord) -> dict[str, str]:
        """Name -> digest."""
        found = {}
        for name, tensor in to_tensors(record).items():
            known = self._known.get(name)
            if known is None or not known.is_of(tensor):
                known = self._known[name] = _Known(tensor, tensor._version, digest_of(tensor))
            found[name] = known.digest
        return found


def digest_of(tensor: Tensor) -> str:
    """Of a tensor's type, shape and values."""
    found = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=_DIGEST_BYTES)
    found.update(codec.encode(tensor).payload.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def tell_model(route: ConfigRecord, digests: Mapping[str, str]) -> None:
    """Write into a request's route which model is meant."""
    route[_MODEL] = json.dumps(digests)


def model_told(request: Message) -> dict[str, str]:
    """Name -> digest of the model that a request means; empty where it holds the whole model, and nothing is to be kept."""
    route = wire.of_kind(request.content, ConfigRecord)[wire.ROUTE]
    return dict(json.loads(str(route.get(_MODEL, "{}"))))


def is_incomplete(reply: Message) -> bool:
    """Whether a client says that it could not complete the model."""
    return reply.has_error() and (reply.error.reason or "").startswith(f"{IncompleteModelError.__name__}:")
