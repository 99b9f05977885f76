"""A request to a client, for tests that call a trainer."""

from typing import Any

from fedsign.records import ObjectiveSpec, Tensors, TrainRequest


def request(tensors: Tensors, partition: int = 2, *, round: int = 1, **changes: Any) -> TrainRequest:
    """A client's request for a round from `tensors`, without a state; `changes` are other fields."""
    values: dict[str, Any] = {"objective": ObjectiveSpec(), "state_version": 0, "needed_versions": frozenset()}
    return TrainRequest(round=round, partition=partition, tensors=tensors, **{**values, **changes})
