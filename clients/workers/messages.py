"""Requests and results as messages between training processes; tensors are in shared memory or sent along."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from clients.state.store import ClientStore
from fedsign.records import CohortReply, Failure, ObjectiveSpec, Role, Tensors, TrainReply, TrainRequest
from fedsign.transport.connection import Message


class GivenStates(ClientStore):
    """The states received with requests, and those to send back with their replies."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.given: dict[int, Tensors] = {}
        self.saved: dict[int, tuple[int, Tensors]] = {}

    def load(self, request: TrainRequest) -> Tensors | None:
        """The state received with the request."""
        return self.given.get(request.partition)

    def save(self, partition: int, version: int, state: Tensors) -> None:
        """Keep a state for the reply."""
        self.saved[partition] = version, state


Result = TrainReply | CohortReply | Failure


def request_message(request: TrainRequest) -> Message:
    """A request without its tensors."""
    objective = {"name": request.objective.name, "settings": dict(request.objective.settings)}
    return {name: getattr(request, name) for name in ("round", "partition", "state_version")} | {"objective": objective}


def request_from(message: Message, tensors: Tensors, shared: Tensors | None = None) -> TrainRequest:
    """Reconstruct a request."""
    return TrainRequest(
        round=message["round"],
        partition=message["partition"],
        tensors=tensors,
        objective=ObjectiveSpec(**message["objective"]),
        state_version=message["state_version"],
        needed_versions=frozenset({message["state_version"]}),  # the parent owns the states and removes old versions
        shared=shared or {},
    )


def partitions_of(result: Result) -> list[int]:
    """The partitions of a result."""
    return list(result.partitions) if isinstance(result, CohortReply) else [result.partition]


def result_message(result: Result) -> Message:
    """A result without its tensors."""
    if isinstance(result, Failure):
        return {"failed": asdict(result)}
    key = "partitions" if isinstance(result, CohortReply) else "partition"
    return {"reply": {name: getattr(result, name) for name in ("round", key, "num_examples", "metrics", "has_state")}}


def result_from(message: Message, roles: Mapping[str, Role], tensors: Tensors, extra: Tensors) -> Result:
    """Reconstruct a result."""
    if "failed" in message:
        return Failure(**message["failed"])
    kind = CohortReply if "partitions" in message["reply"] else TrainReply
    return kind(**message["reply"], tensors=tensors, roles=roles, extra=extra)
