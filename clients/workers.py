"""The clients of a round trained by several processes, which share memory: `engine.workers` of them.

A worker holds the trainer of the configured path, made from the configuration as text, so that nothing is pickled and
the user's own modules are imported as they are here.  The training samples, the received model and the replies lie in
memory that all see ([Note: files without a name] in clients.shared_tensors); over the pipes go a few numbers a client.
The states of clients stay on disk, where the worker writes them.

What is trained together does not depend on the number of workers, and every random stream belongs to a round and a
client: so the bits do not depend on it either, nor on who trains whom.

A worker that dies is reported and replaced.  What it was training is tried once more, client by client (chunk by
chunk on the cohort path); clients whose worker dies again are failures of the round.  Until the first worker is ready,
which takes as long as importing torch, this process trains itself.
"""

import json
import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from clients.cohort import chunks_of
from clients.shared_data import share_data
from clients.shared_tensors import Layout, Slots, slot_bytes_of
from clients.state import ClientStore
from clients.trainer import LocalTrainer
from clients.worker_queue import Queue, Unit
from fedsign.errors import ConfigError, DiskFullError, EngineError
from fedsign.processes import Child, Message, audible
from fedsign.records import Failure, TrainReply, TrainRequest, roles_of
from fedsign.workload import Workload

WORKER_MARK = "FEDSIGN_WORKER"  # an environment variable: this process is one
_MODULE = "clients.worker_process"
_WINDOW_BYTES = 256 * 2**20  # of replies that may wait for their turn
_NUM_JOBS = 2  # at a worker: one that it is at, and one so that it need not wait
_NUM_ATTEMPTS = 2

_log = logging.getLogger("fedsign")

_Key = tuple[int | str, ...]


@dataclass(slots=True, eq=False)
class _Task:
    """What clients of a round are asked alike: a served model in shared memory, with what comes besides, and how."""

    slot: int
    as_json: list[Any]
    layouts: tuple[int, int]


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `train_many`."""

    queue: Queue
    states: ClientStore
    num_left: int
    keys: dict[int, _Key]  # partition -> of its task
    num_open: Counter[_Key]  # clients that a task is kept for
    tasks: dict[_Key, _Task] = field(default_factory=dict)
    ready: deque[tuple[Unit, TrainReply | Failure]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Job:
    """What was handed to a worker: requests with the slots for their replies, until they are answered."""

    call: _Call
    units: list[Unit]
    open: dict[int, tuple[Unit, TrainRequest, int]]


class _Worker:
    """A process, with what it was given to do."""

    def __init__(self, index: int, child: Child) -> None:
        self.index, self.child = index, child
        self.is_ready = False
        self.jobs: dict[int, _Job] = {}  # the first is the one that it is at
        self.layouts: dict[int, Layout] = {}  # its own
        self.known: set[int] = set()  # of ours


class Workers:
    """A LocalTrainer; a context manager, which ends the processes."""

    def __init__(self, workload: Workload, own: LocalTrainer, *, devices: Sequence[str], logs: Path) -> None:
        """`own` trains in this process until the first worker is ready; a device for each worker.

        Raises:
            EngineError: this process is a worker itself.
        """
        if os.environ.get(WORKER_MARK):
            raise EngineError(
                "a worker process was made to play a run, by a module that plays one when it is imported; put that "
                'under `if __name__ == "__main__":`.'
            )
        model = workload.make_model()
        self._workload, self._own, self._devices, self._logs = workload, own, devices, logs
        self._roles = roles_of(model)
        slot_bytes = slot_bytes_of(model.state_dict())
        self._models, self._replies = Slots("models", slot_bytes), Slots("replies", slot_bytes)
        self._data = share_data(workload)
        self._layouts: list[Layout] = []
        self._calls: list[_Call] = []
        self._num_jobs = self._num_tasks = 0
        self._is_starting = True
        logs.mkdir(parents=True, exist_ok=True)
        self._workers: list[_Worker] = []
        try:
            self._workers += (self._start(index) for index in range(len(devices)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def processes(self) -> list[int]:
        """Their ids."""
        return [worker.child.pid for worker in self._workers]

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[TrainReply | Failure]:
        """See LocalTrainer; a reply's tensors lie in shared memory, which is used again when they are gone."""
        call = self._call(list(requests), states)
        self._calls.append(call)
        try:
            while call.num_left:
                self._hand_out()
                if self._is_starting and not call.ready and len(call.queue):
                    self._train_here(call)
                self._hear(0.0 if call.ready else None)
                if call.ready:
                    unit, result = call.ready.popleft()
                    call.num_left -= 1
                    unit.num_passed_on += 1
                    if unit.num_passed_on == len(unit.requests):
                        call.queue.done(unit)
                    yield result
        finally:
            self._calls.remove(call)
            for unit in call.queue.clear():
                self._close(call, unit.requests)

    def await_all(self) -> None:
        """Wait until every worker is ready."""
        while not all(worker.is_ready for worker in self._workers):
            self._hear(None)

    def close(self) -> None:
        """End the processes; logs in which nothing stands are removed."""
        for worker in self._workers:
            worker.child.stop()  # all at once; then each is waited for
        for worker in self._workers:
            worker.child.end()
        for file in (self._models, self._replies, *([self._data.file] if self._data else [])):
            file.close()
        for log in self._logs.glob("worker-*.log"):
            if not log.stat().st_size:
                log.unlink()
        with suppress(OSError):  # some have said something
            self._logs.rmdir()

    # Processes

    def _start(self, index: int) -> _Worker:
        shared = [self._models.descriptor, self._replies.descriptor]
        shared += [self._data.file.descriptor] if self._data else []
        log = self._logs / f"worker-{index}.log"
        worker = _Worker(index, Child(_MODULE, log=log, shared=shared, environment={WORKER_MARK: "1"}))
        config = self._workload.config
        engine = config.engine.model_copy(update={"device": self._devices[index]})
        worker.child.say(
            {
                "config": config.model_copy(update={"engine": engine}).to_toml(),
                "models": [self._models.descriptor, self._models.slot_bytes],
                "replies": [self._replies.descriptor, self._replies.slot_bytes],
                "data": None if self._data is None else self._data.as_json(),
            }
        )
        return worker

    def _hear(self, timeout_s: float | None) -> None:
        """Take in what the workers say; wait for the first word if there is no limit of time."""
        of_child = {worker.child: worker for worker in self._workers}
        for child in audible(of_child, timeout_s):
            for message in child.hear():
                if message is None:
                    self._bury(of_child[child])
                else:
                    self._take_in(of_child[child], message)

    def _bury(self, worker: _Worker) -> None:
        """A worker has died: report it, replace it, see to what it was doing."""
        how = worker.child.epitaph()
        said = f"what it had to say is in {worker.child.log}"
        if not worker.is_ready:
            raise EngineError(f"a worker process {how} before it could train; {said}.")
        _log.warning("worker process %d %s; %s. Another takes its place.", worker.index, how, said)
        self._workers[self._workers.index(worker)] = self._start(worker.index)
        for place, job in enumerate(worker.jobs.values()):
            for _, _, slot in job.open.values():
                self._replies.give_back(slot)
            for unit in job.units:
                self._see_to(job.call, unit, how, was_at_it=place == 0)

    def _see_to(self, call: _Call, unit: Unit, how: str, *, was_at_it: bool) -> None:
        """What a dead worker was given: once more, or a failure."""
        left = [request for request in unit.requests if request.partition not in unit.answered]
        unit.attempts += was_at_it and bool(left)
        if not left:
            return
        if call not in self._calls:
            self._close(call, left)
        elif unit.attempts < _NUM_ATTEMPTS:
            call.queue.give_back(unit)
        else:
            reason = f"the worker process that trained this client {how}, and so did one before it."
            for request in left:
                self._answer(call, unit, request, Failure(partition=request.partition, reason=reason))

    # Work

    def _call(self, requests: Sequence[TrainRequest], states: ClientStore) -> _Call:
        client, partition = self._workload.config.client, self._workload.partition
        together = chunks_of(requests, client.chunk) if client.path == "cohort" else [[each] for each in requests]
        units = [
            Unit(unit, sum(1 if client.local_steps else len(partition[request.partition]) for request in unit))
            for unit in together
        ]
        largest = max((len(unit.requests) for unit in units), default=1)
        window = max(2 * len(self._workers), _WINDOW_BYTES // (largest * self._replies.slot_bytes))
        queue = Queue(units, window=window, num_workers=len(self._workers))
        keys = {request.partition: _key(request) for request in requests}
        return _Call(queue, states, len(requests), keys, Counter(keys.values()))

    def _hand_out(self) -> None:
        """Everyone gets a job; then a second one, except of the last few, which go to whoever is done first."""
        for num_jobs in range(1, _NUM_JOBS + 1):
            for worker in self._workers:
                if worker.is_ready and len(worker.jobs) < num_jobs:
                    call = next((call for call in self._calls if len(call.queue)), None)
                    if call is None or (num_jobs > 1 and len(call.queue) <= len(self._workers)):
                        return
                    self._give(worker, call, call.queue.take())

    def _give(self, worker: _Worker, call: _Call, units: list[Unit]) -> None:
        """Hand a job over."""
        job, tasks = _Job(call, units, {}), dict[_Key, int]()
        clients: list[list[Any]] = []
        for unit in units:
            for request in unit.requests:
                key = call.keys[request.partition]
                if key not in call.tasks:
                    call.tasks[key] = self._task(request)
                slot = self._replies.take()
                job.open[len(clients)] = unit, request, slot
                task = tasks.setdefault(key, len(tasks))
                clients.append([slot, task, request.partition, request.state_version, sorted(request.needed_versions)])
        for number in {number for key in tasks for number in call.tasks[key].layouts} - worker.known:
            worker.known.add(number)
            worker.child.say({"layout": number, "is": self._layouts[number].as_json()})
        worker.jobs[self._num_jobs] = job
        worker.child.say(
            {
                "job": self._num_jobs,
                "states": str(call.states.folder),
                "tasks": [call.tasks[key].as_json for key in tasks],
                "units": [len(unit.requests) for unit in units],
                "clients": clients,
            }
        )
        self._num_jobs += 1

    def _task(self, request: TrainRequest) -> _Task:
        """Write what a request brings into shared memory."""
        slot = self._models.take()
        memory, start, layouts = self._models.memory(slot), 0, []
        for tensors in (request.tensors, request.shared):
            layout = Layout.of(tensors)
            layout.write(tensors, memory[start:])
            start += layout.num_bytes
            if layout not in self._layouts:
                self._layouts.append(layout)
            layouts.append(self._layouts.index(layout))
        objective = request.objective
        self._num_tasks += 1
        as_json = [self._num_tasks, slot, *layouts, request.round, objective.name, dict(objective.settings)]
        return _Task(slot, as_json, (layouts[0], layouts[1]))

    def _take_in(self, worker: _Worker, message: Message) -> None:
        """What a worker says; see clients.worker_process."""
        match message:
            case {"ready": True}:
                worker.is_ready, self._is_starting = True, False
            case {"layout": number, "is": found}:
                worker.layouts[number] = Layout.from_json(found)
            case {"full": sentence}:
                raise DiskFullError(sentence)
            case {"defect": sentence}:
                raise EngineError(f"a worker process could not go on: {sentence}")
            case {"job": number, "client": client}:
                job = worker.jobs[number]
                unit, request, slot = job.open.pop(client)
                if not job.open:
                    del worker.jobs[number]
                if request.partition in unit.answered or "failed" in message:
                    self._replies.give_back(slot)
                    result: TrainReply | Failure = Failure(
                        partition=request.partition,
                        reason=message.get("failed", ""),
                        details=message.get("details", ""),
                    )
                else:
                    result = self._reply(worker, request, slot, message)
                self._answer(job.call, unit, request, result)
            case _:
                raise EngineError(f"a worker process said {message}, which is not understood.")

    def _reply(self, worker: _Worker, request: TrainRequest, slot: int, message: Message) -> TrainReply:
        """A reply whose tensors lie in a slot, which is given back when they are gone."""
        memory, layout = self._replies.lent(slot), worker.layouts[message["tensors"]]
        return TrainReply(
            round=request.round,
            partition=request.partition,
            tensors=layout.read(memory),
            roles=self._roles,
            num_examples=message["num_examples"],
            metrics=message["metrics"],
            has_state=message["has_state"],
            extra=worker.layouts[message["extra"]].read(memory[layout.num_bytes :]),
        )

    def _answer(self, call: _Call, unit: Unit, request: TrainRequest, result: TrainReply | Failure) -> None:
        """A client is done; what is known of it already, from a worker that died later, is not said twice."""
        if request.partition in unit.answered:
            return
        unit.answered.add(request.partition)
        call.ready.append((unit, result))
        self._close(call, [request])

    def _close(self, call: _Call, requests: Iterable[TrainRequest]) -> None:
        """These clients are done; a task that nobody is asked any more makes room."""
        for request in requests:
            key = call.keys[request.partition]
            call.num_open[key] -= 1
            if not call.num_open[key] and key in call.tasks:
                self._models.give_back(call.tasks.pop(key).slot)

    def _train_here(self, call: _Call) -> None:
        """One unit."""
        (unit, *others) = call.queue.take()
        for other in others:
            call.queue.give_back(other)
        requests = {request.partition: request for request in unit.requests}
        for result in self._own.train_many(unit.requests, call.states):
            self._answer(call, unit, requests[result.partition], result)


def _key(request: TrainRequest) -> _Key:
    """The same for requests that differ by the client alone."""
    tensors = (*request.tensors.values(), *request.shared.values())
    settings = json.dumps(dict(request.objective.settings), sort_keys=True)
    return (request.round, request.objective.name, settings, *map(id, tensors))


def devices_of(workload: Workload, num_workers: int) -> list[str]:
    """A device for each worker: the one that the experiment names, or one each of several GPUs.

    Raises:
        ConfigError: there are fewer GPUs than workers, and none is named that they could share.
    """
    name, device = workload.config.engine.device, workload.device
    if device.type == "cpu" or ":" in name:
        return [name] * num_workers
    num_devices = torch.cuda.device_count()
    if num_devices < num_workers:
        raise ConfigError(
            f"engine.workers={num_workers} was given with engine.device={name}, but torch sees {num_devices} CUDA "
            f"device{'s' if num_devices > 1 else ''} here, and expected is one for each worker; lower engine.workers, or name the one "
            "that they share: engine.device=cuda:0."
        )
    return [f"cuda:{index}" for index in range(num_workers)]
