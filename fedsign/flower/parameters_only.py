"""Flower's own strategies see the parameters of a model; its buffers travel beside them.

They treat every array of a model alike, which is wrong for what is not trained: FedAvgM's momentum carries
BatchNorm's variances below zero (NaN in the second round), Krum would measure distances by batch counters,
q-FedAvg and differential privacy cannot scale an integer in place.  So buffers are taken out of what a strategy is shown and
averaged here, by the weights it uses itself; counters are kept.
"""

from collections.abc import Iterable, Mapping
from typing import cast

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedsign.federation.aggregation import WeightedMean
from fedsign.flower import wire
from fedsign.flower.array import to_record, to_tensors
from fedsign.records import Role

NUM_REPLIES_KEY = "num-replies"  # 1 in every reply: weighting by it is weighting uniformly


class ParametersOnly:
    """The messages of one round: completed on their way to the clients, stripped on their way back."""

    def __init__(self, served: ArrayRecord, roles: Mapping[str, Role], *, weighted_by: str) -> None:
        self._served, self._roles, self._weighted_by = served, roles, weighted_by
        self._buffers = WeightedMean()

    @property
    def parameters(self) -> ArrayRecord:
        """What the strategy is shown of the served model, in the order of the replies: some pair the two by position."""
        return _in_order(self._of_role(self._served, Role.PARAMETER), self._roles)

    def completed(self, messages: Iterable[Message]) -> list[Message]:
        """The strategy's messages with the served buffers added; messages may share their arrays."""
        full: dict[int, tuple[ArrayRecord, ArrayRecord]] = {}  # the key is kept alive, so that its id stays its own
        complete = []
        for message in messages:
            key, arrays = _model_in(message.content)
            if id(arrays) not in full:
                record = self._of_role(self._served, Role.BUFFER)
                record.update(arrays)
                full[id(arrays)] = (arrays, _in_order(record, self._roles))
            content = RecordDict(dict(message.content))
            content[key] = full[id(arrays)][1]
            message.content = content
            complete.append(message)
        return complete

    def stripped(self, replies: Iterable[Message]) -> list[Message]:
        """The replies without their buffers, which go into the mean."""
        shown = []
        for reply in replies:
            key, arrays = _model_in(reply.content)
            metrics = next(iter(wire.of_kind(reply.content, MetricRecord).values()))
            weight = 1.0 if self._weighted_by == NUM_REPLIES_KEY else float(cast(int, metrics[wire.NUM_EXAMPLES_KEY]))
            self._buffers.add(to_tensors(self._of_role(arrays, Role.BUFFER)), weight)
            reply.content[key] = self._of_role(arrays, Role.PARAMETER)
            metrics[NUM_REPLIES_KEY] = 1
            shown.append(reply)
        return shown

    def model(self, parameters: ArrayRecord) -> ArrayRecord:
        """What the strategy made, with the mean of the replies' buffers."""
        record = to_record(self._buffers.result()) if self._buffers.count else ArrayRecord()
        record.update(parameters)
        return _in_order(record, self._roles)

    def _of_role(self, arrays: ArrayRecord, role: Role) -> ArrayRecord:
        chosen = ArrayRecord()
        for name, array in arrays.items():
            if self._roles.get(name, Role.PARAMETER) == role:  # an unknown name is the strategy's to answer for
                chosen[name] = array
        return chosen


def release(replies: Iterable[Message]) -> None:
    """Empty replies that are done with.

    Flower's strategies read `content.array_records`, which leaves a cycle of references behind at every access: the arrays
    would stay until Python next collects all garbage, which may be gigabytes later.
    """
    for reply in replies:
        for record in wire.of_kind(reply.content, ArrayRecord).values():
            record.clear()


def _model_in(content: RecordDict) -> tuple[str, ArrayRecord]:
    arrays = wire.arrays_of(content)
    return next(key for key, record in wire.of_kind(content, ArrayRecord).items() if record is arrays), arrays


def _in_order(record: ArrayRecord, roles: Mapping[str, Role]) -> ArrayRecord:
    """In the model's order, which strategies and `state_dict` share; unknown names last."""
    ordered = ArrayRecord()
    for name in [*(name for name in roles if name in record), *(name for name in record if name not in roles)]:
        ordered[name] = record[name]
    return ordered
