"""A process that trains clients for another one: see clients.workers.

In:  what to be, once; then {"layout": n, "is": ...} for each kind of model, and jobs:
     {"job": n, "states": folder, "tasks": [...], "units": [clients of each], "clients": [...]}
Out: {"ready": true} once; for every client of a job {"job": n, "client": place, ...} with `failed` and `details`, or with
     what is said of the reply, whose tensors lie in the client's slot, in layouts that were told before;
     {"full": sentence} where the disk is full, {"defect": sentence} where going on is of no use
"""

import logging
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clients.paths import trainer_of
from clients.shared_data import mapped_data
from clients.shared_tensors import Layout, SharedFile
from clients.state import ClientStore
from clients.trainer import LocalTrainer
from fedsign.config import ExperimentConfig
from fedsign.errors import DiskFullError, FedSignError
from fedsign.processes import Message, Parent
from fedsign.records import Failure, ObjectiveSpec, Tensors, TrainReply, TrainRequest, failure_of
from fedsign.workload import Workload

_LONGEST_SILENCE_S = 0.002  # small clients are answered several at once


def main(parent: Parent) -> None:
    """Train what is asked for, to the end."""
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    requests = parent.requests()
    try:
        worker = _worker(next(requests), parent)
        parent.say(ready=True)
        for request in requests:
            worker.take_in(request)
    except DiskFullError as error:
        parent.say(full=str(error))
    except FedSignError as error:
        parent.say(defect=str(error))
    except Exception as error:  # told to the other process, whatever it is
        logging.getLogger("fedsign").exception("a worker process cannot go on")
        parent.say(defect=failure_of(0, error).reason)


def _worker(given: Message, parent: Parent) -> "_Worker":
    # complete and checked by who sent it; to check it again would import what only a server needs
    config = ExperimentConfig.model_validate(tomllib.loads(given["config"]))
    torch.set_num_threads(config.engine.threads)
    workload = Workload(config)
    if given["data"] is not None:
        vars(workload)["dataset"] = mapped_data(given["data"])  # where cached_property keeps it
    return _Worker(
        parent=parent,
        trainer=trainer_of(workload),
        together=config.client.path == "cohort",
        models=SharedFile(*given["models"]),
        replies=SharedFile(*given["replies"]),
    )


@dataclass(kw_only=True, slots=True)
class _Worker:
    """Answers jobs."""

    parent: Parent
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
        states = ClientStore(Path(message["states"]))
        requests = [self._request(client, message["tasks"]) for client in message["clients"]]
        places = {request.partition: place for place, request in enumerate(requests)}
        num_left = len(requests)
        for unit in _units(requests, message["units"] if self.together else [num_left]):
            for result in self.trainer.train_many(unit, states):
                num_left -= 1
                place = places[result.partition]
                said = self._said(result, slot=message["clients"][place][0])
                self._say({"job": message["job"], "client": place, **said}, now=not num_left)

    def _request(self, client: list[Any], tasks: list[list[Any]]) -> TrainRequest:
        _, task, partition, state_version, needed = client
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
            needed_versions=frozenset(needed),
            shared=self.tasks[slot][2],
        )

    def _said(self, result: TrainReply | Failure, *, slot: int) -> Message:
        """A result in words; the tensors of a reply are written into its slot."""
        if isinstance(result, Failure):
            return {"failed": result.reason, "details": result.details}
        memory, start, layouts = self.replies.memory(slot), 0, []
        for tensors in (result.tensors, result.extra):
            layout = Layout.of(tensors)
            try:
                layout.write(tensors, memory[start:])
            except FedSignError as error:
                failure = failure_of(result.partition, error)
                return {"failed": failure.reason, "details": failure.details}
            start += layout.num_bytes
            layouts.append(self._told(layout))
        return {
            "num_examples": result.num_examples,
            "metrics": dict(result.metrics),
            "has_state": result.has_state,
            "tensors": layouts[0],
            "extra": layouts[1],
        }

    def _told(self, layout: Layout) -> int:
        """The number of a layout, told if it is new."""
        if layout not in self.own:
            self.parent.say(layout=len(self.own), **{"is": layout.as_json()}, flush=False)
            self.own.append(layout)
        return self.own.index(layout)

    def _say(self, message: Message, *, now: bool) -> None:
        moment = time.monotonic()
        now = now or moment - self.said_at > _LONGEST_SILENCE_S
        self.parent.say(**message, flush=now)
        if now:
            self.said_at = moment


def _units(requests: list[TrainRequest], lengths: list[int]) -> Iterator[list[TrainRequest]]:
    start = 0
    for length in lengths:
        yield requests[start : start + length]
        start += length
