"""Show Flower's own strategies the parameters of a model only, as real numbers; its buffers bypass them.

They treat all arrays of a model alike, which is wrong for untrained ones: FedAvgM's momentum drives BatchNorm's
variances below zero (NaN in the second round), Krum would include batch counters in its distances, q-FedAvg and
differential privacy cannot scale integers in place.  So buffers are removed from what a strategy sees, and averaged
here with the strategy's own weights; counters and frozen parameters are kept.

A complex parameter [...] is shown as its parts [..., 2]: a median, or a square of Adam's, is of the parts, as in
torch's optimizers, and NumPy would order complex numbers by their real parts.
"""

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedsign.federation.aggregation import WeightedMean
from fedsign.flower import wire
from fedsign.flower.array import to_record, to_tensors
from fedsign.flower.shims import filled
from fedsign.numerics import as_real
from fedsign.records import Role

NUM_REPLIES_KEY = "num-replies"  # 1 in every reply: a strategy that weights by it weights uniformly


class ParametersOnly:
    """The messages of one round: buffers are added on the way to clients, and removed on the way back."""

    def __init__(self, served: ArrayRecord, roles: Mapping[str, Role], *, weighted_by: str) -> None:
        self._served, self._roles, self._weighted_by = served, roles, weighted_by
        self._buffers = WeightedMean()
        self._complex = [
            name for name in served if roles.get(name) is Role.PARAMETER and served[name].dtype.startswith("complex")
        ]

    @property
    def parameters(self) -> ArrayRecord:
        """The served parameters, in the order of the replies: some strategies match the two by position."""
        return _in_order(self._shown(self._served), self._roles)

    def completed(self, messages: Iterable[Message]) -> list[Message]:
        """The strategy's messages with the served buffers added; messages may share arrays."""
        full: dict[int, tuple[ArrayRecord, ArrayRecord]] = {}  # holds on to the key's object: ids can be reused
        complete = []
        for message in messages:
            key, arrays = _model_in(message.content)
            if id(arrays) not in full:
                record = self._of_role(self._served, Role.BUFFER)
                record.update(self._of_role(self._served, Role.FROZEN))
                record.update(self._meant(arrays))
                full[id(arrays)] = (arrays, _in_order(record, self._roles))
            content = RecordDict(dict(message.content))  # a new one, because the strategy's messages may share theirs
            content[key] = full[id(arrays)][1]
            message.content = content
            complete.append(message)
        return complete

    def stripped(self, replies: Iterable[Message]) -> list[Message]:
        """The replies without their buffers, which are added to the mean."""
        shown = []
        for reply in replies:
            key, arrays = _model_in(reply.content)
            metrics = next(iter(wire.of_kind(reply.content, MetricRecord).values()))
            weight = 1.0 if self._weighted_by == NUM_REPLIES_KEY else float(cast(int, metrics[wire.NUM_EXAMPLES_KEY]))
            # replies come in the order of the requests, which fixes the order of summation
            self._buffers.add(to_tensors(self._of_role(arrays, Role.BUFFER)), weight)
            reply.content[key] = self._shown(arrays)
            metrics[NUM_REPLIES_KEY] = 1
            shown.append(reply)
        return shown

    def model(self, parameters: ArrayRecord) -> ArrayRecord:
        """The strategy's model, completed by the mean of the replies' buffers."""
        record = to_record(self._buffers.result()) if self._buffers.count else ArrayRecord()
        record.update(self._of_role(self._served, Role.FROZEN))
        record.update(self._meant(parameters))
        return _in_order(record, self._roles)

    def _shown(self, arrays: ArrayRecord) -> ArrayRecord:
        """The parameters, complex ones as their parts."""
        chosen = self._of_role(arrays, Role.PARAMETER)
        parts = {name: as_real(to_tensors(filled(ArrayRecord(), {name: chosen[name]}))[name]) for name in self._complex}
        chosen.update(to_record(parts))
        return chosen

    def _meant(self, arrays: ArrayRecord) -> ArrayRecord:
        """The inverse of `_shown`."""
        meant = filled(ArrayRecord(), arrays)
        given = to_tensors(filled(ArrayRecord(), {name: arrays[name] for name in self._complex if name in arrays}))
        meant.update(to_record({name: torch.view_as_complex(tensor.contiguous()) for name, tensor in given.items()}))
        return meant

    def _of_role(self, arrays: ArrayRecord, role: Role) -> ArrayRecord:
        # unknown names are left to the strategy
        chosen = {name: array for name, array in arrays.items() if self._roles.get(name, Role.PARAMETER) == role}
        return filled(ArrayRecord(), chosen)


def release(replies: Iterable[Message]) -> None:
    """Free the arrays of replies that are no longer needed.

    Flower's strategies read `content.array_records`, which creates a reference cycle on every access.  The arrays would
    live until the next garbage collection, possibly gigabytes later.
    """
    for reply in replies:
        for record in wire.of_kind(reply.content, ArrayRecord).values():
            record.clear()


def _model_in(content: RecordDict) -> tuple[str, ArrayRecord]:
    arrays = wire.arrays_of(content)
    return next(key for key, record in wire.of_kind(content, ArrayRecord).items() if record is arrays), arrays


def _in_order(record: ArrayRecord, roles: Mapping[str, Role]) -> ArrayRecord:
    """Sort a record in the order of the model's `state_dict`, as strategies assume; unknown names come last."""
    names = [*(name for name in roles if name in record), *(name for name in record if name not in roles)]
    return filled(ArrayRecord(), {name: record[name] for name in names})
