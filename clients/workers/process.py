"""A process that trains clients for another one: see clients.workers.pool.

In:  what to be, once; then {"layout": n, "is": ...} for each kind of model or state, and jobs:
     {"job": n, "tasks": [...], "units": [[slot, where replies may begin in it, [clients]], ...]}
Out: {"ready": true} once; then for each result {"job": n, "unit": place, "partitions": [...], ...} with `failed` and
     `details`, or with what is said of the reply, whose tensors lie in the unit's slot, in layouts told before;
     {"full": sentence} where the disk is full, {"defect": sentence} where going on is of no use
"""

import logging
import sys
import time
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clients.local_optim import stepper
from clients.local_trainers import provider_of
from clients.state.store import ClientStore
from clients.trainer import LocalTrainer, make_optimizer
from clients.workers.shared_data import workload_from
from fedsign.errors import DiskFullError, FedSignError
from fedsign.records import Failure, ObjectiveSpec, ReplyStack, Tensors, TrainReply, TrainRequest, failure_of
from fedsign.transport.connection import Connection, Message
from fedsign.transport.tensors import Layout, SharedFile
from fedsign.workload import Workload

_LONGEST_SILENCE_S = 0.002  # small clients are answered several at once


def main(parent: Connection) -> None:
    """Train what is asked for, to the end."""
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    requests = iter(parent)
    try:
        given = next(requests)
        workload = workload_from(given)
        _warm_up(workload)
        with provider_of(workload).open(logs=Path(), in_process=False) as trainer:
            worker = _Worker(
                parent=parent,
                trainer=trainer,
                together=workload.config.get("client.chunk", 0) > 0,
                models=SharedFile(*given["models"]),
                replies=SharedFile(*given["replies"]),
            )
            parent.send({"ready": True})
            for request in requests:
                worker.take_in(request)
    except DiskFullError as error:
        parent.send({"full": str(error)})
    except FedSignError as error:
        parent.send({"defect": str(error)})
    except Exception as error:  # told to the other process, whatever it is
        logging.getLogger("fedsign").exception("a worker process cannot go on")
        parent.send({"defect": failure_of(0, error).reason})


def _warm_up(workload: Workload) -> None:
    """One step: with the first one of most optimisers torch imports its compiler, which takes as long as its own import."""
    model = workload.make_model()
    smallest = min(model.parameters(), key=Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    stepper(make_optimizer(workload, model, round=1)).step()


class _Given(ClientStore):
    """The states that came with a job, and those that go back with its replies."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.given: dict[int, Tensors] = {}
        self.saved: dict[int, tuple[int, Tensors]] = {}

    def load(self, request: TrainRequest) -> Tensors | None:
        """See ClientStore."""
        return self.given.get(request.partition)

    def save(self, partition: int, version: int, state: Tensors) -> None:
        """See ClientStore."""
        self.saved[partition] = version, state


@dataclass(kw_only=True, slots=True)
class _Unit:
    """Where the next reply of a unit is written."""

    place: int
    memory: Tensor
    start: int


@dataclass(kw_only=True, slots=True)
class _Worker:
    """Answers jobs."""

    parent: Connection
    trainer: LocalTrainer
    together: bool  # whether a unit is trained as a whole
    models: SharedFile
    replies: SharedFile
    layouts: dict[int, Layout] = field(default_factory=dict)  # of the other process
    own: list[Layout] = field(default_factory=list)
    tasks: dict[int, tuple[int, Tensors, Tensors]] = field(default_factory=dict)  # slot -> the last one that lay there
    said_at: float = 0.0

    def take_in(self, message: Message) -> None:
        """A layout, or a job."""
        if "layout" in message:
            self.layouts[message["layout"]] = Layout.from_json(message["is"])
            return
        states, unit_of, units = _Given(), dict[int, _Unit](), []
        for place, (slot, start, clients) in enumerate(message["units"]):
            unit = _Unit(place=place, memory=self.replies.memory(slot), start=start)
            units.append([self._request(client, message["tasks"]) for client in clients])
            for _, partition, _, layout, begin in clients:
                unit_of[partition] = unit
                if layout is not None:
                    states.given[partition] = self.layouts[layout].read(unit.memory[begin:])
        num_left = len(unit_of)
        for requests in units if self.together else [list(chain.from_iterable(units))]:
            for result in self.trainer.train_many(requests, states):
                partitions = list(result.partitions) if isinstance(result, ReplyStack) else [result.partition]
                num_left -= len(partitions)
                unit = unit_of[partitions[0]]
                head = {"job": message["job"], "unit": unit.place}
                try:
                    self._say(head | self._said(result, partitions, unit, states), now=not num_left)
                except FedSignError as error:
                    for partition in partitions:
                        self._say(head | _failed(failure_of(partition, error)), now=True)

    def _request(self, client: list[Any], tasks: list[list[Any]]) -> TrainRequest:
        task, partition, state_version, _, _ = client
        number, slot, tensors, shared, round, name, settings = tasks[task]
        if slot not in self.tasks or self.tasks[slot][0] != number:
            memory, layout = self.models.memory(slot), self.layouts[tensors]
            self.tasks[slot] = number, layout.read(memory), self.layouts[shared].read(memory[layout.num_bytes :])
        return TrainRequest(
            round=round,
            partition=partition,
            tensors=self.tasks[slot][1],
            objective=ObjectiveSpec(name=name, settings=settings),
            state_version=state_version,
            needed_versions=frozenset({state_version}),
            shared=self.tasks[slot][2],
        )

    def _said(
        self, result: TrainReply | ReplyStack | Failure, partitions: list[int], unit: _Unit, states: _Given
    ) -> Message:
        """A result in words; the tensors of a reply, and its clients' new states, are written into shared memory.

        Raises:
            FedSignError: they are more than expected.
        """
        if isinstance(result, Failure):
            return _failed(result)
        start = unit.start
        saved = {partition: states.saved.pop(partition) for partition in partitions if partition in states.saved}
        is_stack = isinstance(result, ReplyStack)
        tensors = self._written(result.tensors, unit, contiguous=not is_stack)  # as the copies of one process are
        extra, *of_states = [
            self._written(tensors, unit) for tensors in (result.extra, *(state for _, state in saved.values()))
        ]
        return {
            "partitions": partitions,
            "round": result.round,
            "is_stack": is_stack,
            "start": start,
            "num_examples": list(result.num_examples) if isinstance(result, ReplyStack) else [result.num_examples],
            "metrics": {name: value if is_stack else [value] for name, value in result.metrics.items()},
            "has_state": result.has_state,
            "tensors": tensors,
            "extra": extra,
            "states": [
                [partition, version, number]
                for (partition, (version, _)), number in zip(saved.items(), of_states, strict=True)
            ],
        }

    def _written(self, tensors: Tensors, unit: _Unit, *, contiguous: bool = False) -> int:
        """Write tensors behind what the unit's memory holds; the number of their layout, told if it is new."""
        layout = Layout.of(tensors, contiguous=contiguous)
        layout.write(tensors, unit.memory[unit.start :])
        unit.start += layout.num_bytes
        if layout not in self.own:
            self.parent.send({"layout": len(self.own), "is": layout.as_json()}, flush=False)
            self.own.append(layout)
        return self.own.index(layout)

    def _say(self, message: Message, *, now: bool) -> None:
        moment = time.monotonic()
        now = now or moment - self.said_at > _LONGEST_SILENCE_S
        self.parent.send(message, flush=now)
        if now:
            self.said_at = moment


def _failed(failure: Failure) -> Message:
    return {"partitions": [failure.partition], "failed": failure.reason, "details": failure.details}
