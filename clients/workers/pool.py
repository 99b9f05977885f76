"""Train the clients of a round in `engine.workers` processes that share memory.

A worker holds the trainer of the configured path, built from the configuration as text, so nothing is pickled and user
modules are imported as in this process.  Training samples, received models, client states, and replies are in shared
memory ([Note: files without a name] in fedsign.transport.tensors); messages carry a few numbers per client.  This
process owns the states, so every client finds its state whichever worker trains it.

Results are bitwise independent of the number of workers and of the assignment: what is trained together does not depend
on them, and every random stream belongs to a round and a client.

A worker that dies is reported and replaced.  Its clients are tried once more, one by one (on the cohort path chunk by
chunk), and fail if their worker dies again.  A worker whose client hangs for longer than server.round_timeout_s is
ended and replaced as well.  Therefore this process never trains itself, not even until the first worker is ready.
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from clients.local_trainers import chunks_of
from clients.state.store import ClientStore
from clients.workers.messages import Result, partitions_of, request_message, result_from
from clients.workers.queue import Queue, Unit
from clients.workers.shared_data import TrainingProcesses
from fedsign.errors import ConfigError, DiskFullError, EngineError
from fedsign.records import LATE, CohortReply, Failure, Tensors, TrainRequest, failure_of
from fedsign.transport.connection import Message, poll
from fedsign.transport.process import ChildProcess
from fedsign.transport.tensors import Layout
from fedsign.workload import Workload

_MODULE = "clients.workers.process"
_WINDOW_BYTES = 256 * 2**20  # limit for replies that wait for their turn
_NUM_JOBS = 2  # per worker: the current one, and the next one to avoid waiting
_NUM_ATTEMPTS = 2
_GRACE_S = 2.0

_log = logging.getLogger("fedsign")


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Task:
    """A served model and auxiliary tensors in shared memory; its slot becomes free with the last job that uses it."""

    memory: Tensor
    message: Message


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `train_many`."""

    queue: Queue
    states: ClientStore
    num_left: int  # units not finished
    tasks: WeakValueDictionary[object, _Task] = field(default_factory=WeakValueDictionary)
    # with the unit that this result completes, if any
    ready: deque[tuple[Result, Unit | None]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Share:
    """A unit at a worker, and the memory for its replies, which is reused once it is unreferenced."""

    unit: Unit
    memory: Tensor
    num_left: int


@dataclass(slots=True, eq=False)
class _Job:
    """Units assigned to a worker; `shares` maps positions to the unfinished ones."""

    call: _Call
    tasks: list[_Task] = field(default_factory=list)
    shares: dict[int, _Share] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker process and its jobs."""

    index: int
    child: ChildProcess
    is_ready: bool = False
    jobs: dict[int, _Job] = field(default_factory=dict)  # the first one is running
    last_message_at: float = 0.0  # time of its last message, or of its first job
    is_late: bool = False


class Workers:
    """A LocalTrainer with a pool of processes; `close` ends them."""

    def __init__(self, workload: Workload, *, devices: Sequence[str], logs: Path) -> None:
        """Start one process per entry of `devices`; they log to files in `logs`.

        Raises:
            EngineError: this process is a worker itself.
        """
        self._workload, self._devices, self._roles = workload, devices, workload.roles
        self._largest_unit = workload.config.get("client.chunk", 0) or 1
        # A stack replies as a whole.  The grace lets a late client report itself before its worker is killed.
        self._longest_silence_s = self._largest_unit * workload.config.server.round_timeout_s + _GRACE_S
        self._processes = TrainingProcesses(
            workload, _MODULE, name="worker", logs=logs, clients_per_reply=self._largest_unit
        )
        self._models, self._replies = self._processes.models, self._processes.replies
        self._calls: list[_Call] = []
        self._num_jobs = 0
        self._workers: list[_Worker] = []
        try:
            for index in range(len(devices)):
                self._workers.append(self._start(index))
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[int]:
        """The process ids."""
        return [worker.child.process.pid for worker in self._workers]

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[Result]:
        """Train clients in parallel; replies are in shared memory, which is reused once they are released."""
        call = self._call(list(requests), states)
        self._calls.append(call)  # until the caller stops; results of an abandoned call are dropped
        try:
            while call.num_left:
                self._hand_out()
                self._poll(0.0 if call.ready else self._patience_s())  # wait only if there is no reply to yield
                self._end_the_late()
                if call.ready:
                    result, done = call.ready.popleft()
                    if done is not None:  # only now does the window advance, so replies that wait are bounded
                        call.queue.done(done)
                        call.num_left -= 1
                    yield result
                    del result  # lets its memory be reused as soon as the caller releases it
        finally:
            self._calls.remove(call)

    def await_all(self) -> None:
        """Wait until every worker is ready."""
        while not all(worker.is_ready for worker in self._workers):
            self._poll(None)

    def close(self) -> None:
        """End the processes and remove empty logs."""
        self._processes.close([worker.child for worker in self._workers])

    # Processes

    def _start(self, index: int) -> _Worker:
        child = self._processes.start(index, device=self._devices[index], environment=_large_pages())
        return _Worker(index, child)

    def _poll(self, timeout_s: float | None) -> None:
        """Handle the workers' messages; wait for the first one, indefinitely without a timeout."""
        worker_of = {worker.child.connection: worker for worker in self._workers}
        for connection in poll(worker_of, timeout_s):
            worker = worker_of[connection]
            worker.last_message_at = time.monotonic()
            for message in connection.drain():
                if message is None:
                    self._replace(worker)
                else:
                    self._handle(worker, message)

    def _replace(self, worker: _Worker) -> None:
        """Report a dead worker, replace it, and reassign its jobs."""
        how = worker.child.exit_reason()
        hint = f"what it had to say is in {worker.child.log}"
        if not worker.is_ready:
            raise EngineError(f"a worker process {how} before it could train; {hint}.")  # the next one would fail alike
        _log.warning("worker process %d %s; %s. Another takes its place.", worker.index, how, hint)
        self._workers[self._workers.index(worker)] = self._start(worker.index)
        for index, job in enumerate(worker.jobs.values()):
            for share in job.shares.values():
                self._see_to(job, share.unit, how, was_at_it=index == 0, is_late=worker.is_late)

    def _see_to(self, job: _Job, unit: Unit, how: str, *, was_at_it: bool, is_late: bool) -> None:
        """Retry a dead worker's unit, or report its failure.

        In a job with several units it is unknown which one was late, so each is retried as a separate job.
        """
        if job.call not in self._calls:
            return
        # only the running job counts as an attempt; queued ones did not cause the death
        unit.attempts += was_at_it and not is_late
        is_over = unit.attempts >= _NUM_ATTEMPTS
        reason = f"the worker process that trained this client {how}, and so did one before it."
        if is_late:
            is_over, reason = was_at_it and len(job.shares) == 1, LATE
        if not is_over:
            job.call.queue.give_back(unit)
            return
        for request in unit.requests:
            self._answer(job.call, unit, Failure(partition=request.partition, reason=reason))

    def _patience_s(self) -> float | None:
        """The time until the next busy worker is late."""
        ends = [worker.last_message_at + self._longest_silence_s for worker in self._workers if worker.jobs]
        earliest = min(ends, default=inf)
        return None if earliest == inf else max(0.0, earliest - time.monotonic())

    def _end_the_late(self) -> None:
        """Kill workers whose clients hang; polling then notices and replaces them."""
        for worker in self._workers:
            if (
                worker.jobs
                and time.monotonic() > worker.last_message_at + self._longest_silence_s
                and not worker.is_late
            ):
                worker.is_late = True
                worker.child.process.kill()

    # Work

    def _call(self, requests: Sequence[TrainRequest], states: ClientStore) -> _Call:
        client, partition = self._workload.config.client, self._workload.partition
        units = [
            # with local_steps, a client's cost does not depend on its number of samples
            Unit(unit, sum(1 if client.local_steps else len(partition[request.partition]) for request in unit))
            for unit in chunks_of(requests, self._largest_unit)
        ]
        window = window_of(len(self._workers), self._largest_unit * self._processes.model_bytes)
        return _Call(Queue(units, window=window, num_workers=len(self._workers)), states, len(units))

    def _hand_out(self) -> None:
        """Give every worker a job, then a second one; the last few units wait for whoever finishes first."""
        for num_jobs in range(1, _NUM_JOBS + 1):
            for worker in self._workers:
                if worker.is_ready and len(worker.jobs) < num_jobs:
                    call = next((call for call in self._calls if len(call.queue)), None)
                    if call is None or (num_jobs > 1 and len(call.queue) <= len(self._workers)):
                        return
                    self._give(worker, call, call.queue.take())

    def _give(self, worker: _Worker, call: _Call, units: list[Unit]) -> None:
        """Assign a job to a worker."""
        job = _Job(call)
        requested_units: list[tuple[int, int, list[Message]]] = []
        for unit in units:
            slot = self._replies.take()
            memory, start, clients = self._replies.lent(slot), 0, []  # states first; replies follow from `start` on
            for request in unit.requests:
                task = self._task(call, request)
                if task not in job.tasks:
                    job.tasks.append(task)
                try:
                    state = call.states.load(request)
                except DiskFullError:
                    raise
                except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
                    self._answer(call, unit, failure_of(request.partition, error))
                    continue
                client = {**request_message(request), "task": job.tasks.index(task)}
                if state is not None:
                    layout = _written(state, memory[start:])
                    client["state"] = [start, layout.as_json()]
                    start += layout.num_bytes
                clients.append(client)
            if clients:
                job.shares[len(requested_units)] = _Share(unit, memory, len(clients))
                requested_units.append((slot, start, clients))
        if not requested_units:
            return
        if not worker.jobs:  # an idle worker is silent: count from its first job
            worker.last_message_at = time.monotonic()
        worker.jobs[self._num_jobs] = job
        tasks = [task.message for task in job.tasks]
        worker.child.connection.send({"job": self._num_jobs, "tasks": tasks, "units": requested_units})
        self._num_jobs += 1

    def _task(self, call: _Call, request: TrainRequest) -> _Task:
        """A request's tensors in shared memory, shared by requests that differ only in the client."""
        objective, tensors = request.objective, (*request.tensors.values(), *request.shared.values())
        # By identity: within a round all requests hold the same tensors, and comparing values would be slow.
        key = (objective.name, json.dumps(dict(objective.settings), sort_keys=True), *map(id, tensors))
        task = call.tasks.get(key)
        if task is None:
            slot = self._models.take()
            memory = self._models.lent(slot)
            model = _written(request.tensors, memory)
            shared = _written(request.shared, memory[model.num_bytes :])
            message = {"slot": slot, "model": model.as_json(), "shared": shared.as_json()}
            call.tasks[key] = task = _Task(memory, message)
        return task

    def _handle(self, worker: _Worker, message: Message) -> None:
        """Handle a worker's message; see clients.workers.process."""
        match message:
            case {"ready": True}:
                worker.is_ready = True
            case {"full": sentence}:
                raise DiskFullError(sentence)
            case {"defect": sentence}:
                raise EngineError(f"a worker process could not go on: {sentence}")
            case {"job": number, "unit": index}:
                job = worker.jobs[number]
                share = job.shares[index]
                result = self._result(job.call, share, message)
                if job.call in self._calls:
                    self._answer(job.call, share.unit, result)
                share.num_left -= len(partitions_of(result))
                if not share.num_left:
                    del job.shares[index]
                if not job.shares:
                    del worker.jobs[number]

    def _result(self, call: _Call, share: _Share, message: Message) -> Result:
        """Build a result from the worker's memory, and save its states if the call is still active."""
        tensors_of, start = [], message["start"]
        for layout in map(Layout.from_json, message["layouts"]):
            tensors_of.append(layout.read(share.memory[start:]))
            start += layout.num_bytes
        tensors, extra, *states = tensors_of or [{}, {}]
        for (partition, version), state in zip(message["states"], states, strict=True):
            if call in self._calls:
                call.states.save(partition, version, state)
        return result_from(message, self._roles, tensors, extra)

    def _answer(self, call: _Call, unit: Unit, result: Result) -> None:
        """Queue a result, without clients that a worker had answered before it died."""
        partitions = partitions_of(result)
        known = [index for index, partition in enumerate(partitions) if partition in unit.answered]
        if len(known) == len(partitions):
            return
        if known and isinstance(result, CohortReply):
            result = result.without(known)
        unit.answered.update(partitions)
        call.ready.append((result, unit if len(unit.answered) == len(unit.requests) else None))


def window_of(num_workers: int, unit_bytes: int) -> int:
    """Units whose replies may wait for their turn."""
    return max(2 * num_workers, _WINDOW_BYTES // unit_bytes)


def _written(tensors: Tensors, memory: Tensor) -> Layout:
    """Write tensors into memory."""
    layout = Layout.of(tensors)
    layout.write(tensors, memory)
    return layout


def _large_pages() -> dict[str, str]:
    """Environment that makes glibc use huge pages for large tensors; must be set before a process starts."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    pages = [] if "glibc.malloc.hugetlb" in tunables else ["glibc.malloc.hugetlb=1"]
    return {"GLIBC_TUNABLES": ":".join([tunables] * bool(tunables) + pages)}


def devices_of(workload: Workload, num_workers: int) -> list[str]:
    """A device for each worker: the one that the experiment names, or separate GPUs.

    Raises:
        ConfigError: there are fewer GPUs than workers, and none was named to share.
    """
    name, device = workload.config.engine.device, workload.device
    if device.type == "cpu" or ":" in name:
        return [name] * num_workers
    num_devices = torch.cuda.device_count()
    if num_devices < num_workers:
        raise ConfigError(
            f"engine.workers={num_workers} was given with engine.device={name}, but torch sees {num_devices} CUDA "
            f"device{'s' if num_devices > 1 else ''} here, and expected one for each worker; "
            "lower engine.workers, or name the one that they share: engine.device=cuda:0."
        )
    return [f"cuda:{index}" for index in range(num_workers)]
