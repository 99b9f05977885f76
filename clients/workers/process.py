"""The process of a worker (see clients.workers.pool).

In:  its settings, once; then jobs {"job": n, "tasks": [...], "units": [[slot, offset for replies, [clients]], ...]}
Out: {"ready": true} once; then per result {"job": n, "unit": index, ...} with the result (clients.workers.messages),
     whose tensors and states are in the unit's slot, in sequence from `start`, with these `layouts`;
     {"full": sentence} if the disk is full, {"defect": sentence} if it cannot continue
"""

import logging
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from clients.local_optim import stepper
from clients.local_trainers import provider_of
from clients.trainer import LocalTrainer, make_optimizer
from clients.workers.messages import GivenStates, Result, partitions_of, request_from, result_message
from clients.workers.shared_data import workload_from
from fedsign.errors import DiskFullError, FedSignError, shortage_of
from fedsign.records import CohortReply, Failure, Tensors, failure_of
from fedsign.transport.connection import Connection, Message
from fedsign.transport.tensors import Layout, SharedFile
from fedsign.workload import Workload


def main(parent: Connection) -> None:
    """Train clients until the connection ends."""
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
                worker.train(request)
    except DiskFullError as error:
        parent.send({"full": str(error)})
    except FedSignError as error:
        parent.send({"defect": str(shortage_of(error) or error)})
    except Exception as error:  # any error is reported to the parent
        logging.getLogger("fedsign").exception("a worker process cannot go on")
        parent.send({"defect": failure_of(0, error).reason})


def _warm_up(workload: Workload) -> None:
    """Take one optimizer step: the first one may import torch's compiler, which takes as long as importing torch."""
    model = workload.make_model()
    smallest = min(model.parameters(), key=Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    stepper(make_optimizer(workload, model, round=1)).step()


@dataclass(kw_only=True, slots=True)
class _Unit:
    """The position at which the next reply of a unit is written."""

    index: int
    memory: Tensor
    start: int


@dataclass(kw_only=True, slots=True)
class _Worker:
    """Processes jobs."""

    parent: Connection
    trainer: LocalTrainer
    together: bool  # whether to train a unit as a whole
    models: SharedFile
    replies: SharedFile

    def train(self, job: Message) -> None:
        """Train the clients of a job and send the results."""
        tasks = [self._received(task) for task in job["tasks"]]
        states, unit_of, units = GivenStates(), dict[int, _Unit](), []
        for index, (slot, start, clients) in enumerate(job["units"]):
            unit = _Unit(index=index, memory=self.replies.memory(slot), start=start)
            units.append([request_from(client, *tasks[client["task"]]) for client in clients])
            for client in clients:
                unit_of[client["partition"]] = unit
                if "state" in client:
                    begin, layout = client["state"]
                    states.given[client["partition"]] = Layout.from_json(layout).read(unit.memory[begin:])
        # A stack is exactly one unit, so that it does not depend on which units share a job.
        for requests in units if self.together else [list(chain.from_iterable(units))]:
            for result in self.trainer.train_many(requests, states):
                partitions = partitions_of(result)
                unit = unit_of[partitions[0]]
                head = {"job": job["job"], "unit": unit.index}
                try:
                    self.parent.send(head | _write_result(result, partitions, unit, states))
                except FedSignError as error:  # larger than the slot
                    for partition in partitions:
                        failure = failure_of(partition, error)
                        self.parent.send(head | _write_result(failure, [partition], unit, states))

    def _received(self, task: Message) -> tuple[Tensors, Tensors]:
        """The model and the auxiliary tensors of a task."""
        memory, model = self.models.memory(task["slot"]), Layout.from_json(task["model"])
        return model.read(memory), Layout.from_json(task["shared"]).read(memory[model.num_bytes :])


def _write_result(result: Result, partitions: list[int], unit: _Unit, states: GivenStates) -> Message:
    """Make a result's message, and write its tensors and new states into the unit's memory.

    Raises:
        FedSignError: they exceed the memory.
    """
    message = {**result_message(result), "start": unit.start, "layouts": [], "states": []}
    if isinstance(result, Failure):
        return message
    saved = {partition: states.saved.pop(partition) for partition in partitions if partition in states.saved}
    all_tensors = [result.tensors, result.extra, *(state for _, state in saved.values())]
    for index, tensors in enumerate(all_tensors):
        is_one_model = index == 0 and not isinstance(result, CohortReply)
        layout = Layout.of(tensors, contiguous=is_one_model)  # like the copies made in a single process
        layout.write(tensors, unit.memory[unit.start :])
        unit.start += layout.num_bytes
        message["layouts"].append(layout.as_json())
    message["states"] = [(partition, version) for partition, (version, _) in saved.items()]
    return message
