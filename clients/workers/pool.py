"""The clients of a round trained by several processes, which share memory: `engine.workers` of them.

A worker holds the trainer of the configured path, made from the configuration as text, so that nothing is pickled and
the user's own modules are imported as they are here.  The training samples, the received model, the clients' states and
the replies lie in memory that all see ([Note: files without a name] in fedsign.transport.tensors); messages bring a few
numbers a client.  States are kept by this process, so that each client finds its own whoever trains it.

What is trained together does not depend on the number of workers, and every random stream belongs to a round and a
client: so the bits do not depend on it either, nor on who trains whom.

A worker that dies is reported and replaced.  What it was training is tried once more, client by client (chunk by
chunk on the cohort path); clients whose worker dies again are failures of the round.  A worker whose client hangs, for
longer than server.round_timeout_s, is ended and replaced likewise; therefore this process never trains itself, not even
until the first worker is ready.
"""

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clients.local_trainers import chunks_of
from clients.state.store import ClientStore
from clients.workers.queue import Queue, Unit
from clients.workers.shared_data import described, share_data
from fedsign import plugins
from fedsign.errors import ConfigError, DiskFullError, EngineError
from fedsign.models.transform import packing_of
from fedsign.records import LATE, Failure, ReplyStack, Tensors, TrainReply, TrainRequest, failure_of
from fedsign.transport.connection import Message, poll
from fedsign.transport.process import ChildProcess, close_all, refuse_nested, remove_empty_logs
from fedsign.transport.tensors import Layout, Slots, slot_bytes_of
from fedsign.workload import Workload

WORKER_MARK = "FEDSIGN_WORKER"  # an environment variable: this process is one
_MODULE = "clients.workers.process"
_WINDOW_BYTES = 256 * 2**20  # of replies that may wait for their turn
_NUM_JOBS = 2  # at a worker: one that it is at, and one so that it need not wait
_NUM_ATTEMPTS = 2
_GRACE_S = 2.0

Result = TrainReply | ReplyStack | Failure
_Key = tuple[int | str, ...]
_log = logging.getLogger("fedsign")


@dataclass(slots=True, eq=False)
class _Task:
    """What clients of a round are asked alike: a served model in shared memory, with what comes besides, and how."""

    slot: int
    as_json: list[Any]
    layouts: tuple[int, int]
    has_state: bool


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `train_many`."""

    queue: Queue
    states: ClientStore
    num_left: int
    keys: dict[int, _Key]  # partition -> of its task
    num_open: Counter[_Key]  # clients that a task is kept for
    tasks: dict[_Key, _Task] = field(default_factory=dict)
    ready: deque[tuple[Unit, Result]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Share:
    """A unit at a worker, and the memory for its replies, which is used again when nothing refers to it any more."""

    unit: Unit
    memory: Tensor
    num_left: int


@dataclass(slots=True, eq=False)
class _Job:
    """What was handed to a worker: place -> what it has not finished."""

    call: _Call
    shares: dict[int, _Share]


class _Worker:
    """A process, with what it was given to do."""

    def __init__(self, index: int, child: ChildProcess) -> None:
        self.index, self.child = index, child
        self.is_ready = False
        self.jobs: dict[int, _Job] = {}  # the first is the one that it is at
        self.heard_at = 0.0  # or given something to do
        self.is_late = False
        self.layouts: dict[int, Layout] = {}  # its own
        self.known: set[int] = set()  # of ours


class Workers:
    """A LocalTrainer; `close` ends its processes."""

    def __init__(self, workload: Workload, *, devices: Sequence[str], logs: Path) -> None:
        """Start a process for each device; what they have to say goes to files in `logs`.

        Raises:
            EngineError: this process is a worker itself.
        """
        refuse_nested(WORKER_MARK, "a worker process")
        module = workload.make_model()
        model = packing_of(module).packed(module.state_dict())
        self._workload, self._devices, self._logs = workload, devices, logs
        self._roles = workload.roles
        self._largest_unit = workload.config.get("client.chunk", 0) or 1
        # a stack answers as a whole; one client that is late says so itself, before it is ended
        self._longest_silence_s = self._largest_unit * workload.config.server.round_timeout_s + _GRACE_S
        self._model_bytes = sum(tensor.nbytes for tensor in model.values())
        self._models = Slots("models", slot_bytes_of(model))
        self._replies = Slots("replies", self._largest_unit * slot_bytes_of(model))
        self._data = share_data(workload)
        self._layouts: list[Layout] = []
        self._calls: list[_Call] = []
        self._num_jobs = self._num_tasks = 0
        logs.mkdir(parents=True, exist_ok=True)
        self._workers: list[_Worker] = []
        try:
            for index in range(len(devices)):
                self._workers.append(self._start(index))
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[int]:
        """Their ids."""
        return [worker.child.process.pid for worker in self._workers]

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[Result]:
        """See LocalTrainer; a reply's tensors lie in shared memory, which is used again when they are gone."""
        call = self._call(list(requests), states)
        self._calls.append(call)
        try:
            while call.num_left:
                self._hand_out()
                self._poll(0.0 if call.ready else self._patience_s())
                self._end_the_late()
                if call.ready:
                    unit, result = call.ready.popleft()
                    num = len(result) if isinstance(result, ReplyStack) else 1
                    call.num_left -= num
                    unit.num_passed_on += num
                    if unit.num_passed_on == len(unit.requests):
                        call.queue.done(unit)
                    yield result
                    del result  # its memory may be used again as soon as the caller is done with it
        finally:
            self._calls.remove(call)
            for unit in call.queue.clear():
                self._close(call, [request.partition for request in unit.requests])

    def await_all(self) -> None:
        """Wait until every worker is ready."""
        while not all(worker.is_ready for worker in self._workers):
            self._poll(None)

    def close(self) -> None:
        """End the processes; logs in which nothing stands are removed."""
        close_all([worker.child for worker in self._workers])
        for file in (self._models, self._replies, *([self._data.file] if self._data else [])):
            file.close()
        remove_empty_logs(self._logs, "worker-*.log")

    # Processes

    def _start(self, index: int) -> _Worker:
        shared = [self._models.descriptor, self._replies.descriptor]
        shared += [self._data.file.descriptor] if self._data else []
        log = self._logs / f"worker-{index}.log"
        worker = _Worker(index, ChildProcess(_MODULE, log=log, descriptors=shared, environment=_environment()))
        worker.child.connection.send(
            {
                **described(self._workload, device=self._devices[index]),
                "models": [self._models.descriptor, self._models.slot_bytes],
                "replies": [self._replies.descriptor, self._replies.slot_bytes],
                "data": None if self._data is None else self._data.as_json(),
            }
        )
        return worker

    def _poll(self, timeout_s: float | None) -> None:
        """Handle the workers' messages; wait for the first one if there is no timeout."""
        worker_of = {worker.child.connection: worker for worker in self._workers}
        for connection in poll(worker_of, timeout_s):
            worker = worker_of[connection]
            worker.heard_at = time.monotonic()
            for message in connection.drain():
                if message is None:
                    self._replace(worker)
                else:
                    self._handle(worker, message)

    def _replace(self, worker: _Worker) -> None:
        """A worker has died: report it, replace it, see to what it was doing."""
        how = worker.child.exit_reason()
        said = f"what it had to say is in {worker.child.log}"
        if not worker.is_ready:
            raise EngineError(f"a worker process {how} before it could train; {said}.")
        _log.warning("worker process %d %s; %s. Another takes its place.", worker.index, how, said)
        self._workers[self._workers.index(worker)] = self._start(worker.index)
        for place, job in enumerate(worker.jobs.values()):
            for share in job.shares.values():
                if worker.is_late:
                    self._see_to_late(job, share.unit, was_at_it=place == 0)
                else:
                    self._see_to(job.call, share.unit, how, was_at_it=place == 0)

    def _see_to(self, call: _Call, unit: Unit, how: str, *, was_at_it: bool) -> None:
        """What a dead worker was given: once more, or a failure."""
        left = [request.partition for request in unit.requests if request.partition not in unit.answered]
        unit.attempts += was_at_it
        if call not in self._calls:
            self._close(call, left)
        elif unit.attempts < _NUM_ATTEMPTS:
            call.queue.give_back(unit)
        else:
            reason = f"the worker process that trained this client {how}, and so did one before it."
            for partition in left:
                self._answer(call, unit, Failure(partition=partition, reason=reason))

    def _see_to_late(self, job: _Job, unit: Unit, *, was_at_it: bool) -> None:
        """A job of several units does not say which one is late: each is tried once more, as a job of its own."""
        left = [request.partition for request in unit.requests if request.partition not in unit.answered]
        if job.call not in self._calls:
            self._close(job.call, left)
        elif not was_at_it or len(job.shares) > 1:
            job.call.queue.give_back(unit)
        else:
            for partition in left:
                self._answer(job.call, unit, Failure(partition=partition, reason=LATE))

    def _patience_s(self) -> float | None:
        """Until the next worker that is at something is late."""
        ends = [worker.heard_at + self._longest_silence_s for worker in self._workers if worker.jobs]
        earliest = min(ends, default=inf)
        return None if earliest == inf else max(0.0, earliest - time.monotonic())

    def _end_the_late(self) -> None:
        """A client that hangs can only be ended with its process, which is heard to be gone, and replaced."""
        for worker in self._workers:
            if worker.jobs and time.monotonic() > worker.heard_at + self._longest_silence_s and not worker.is_late:
                worker.is_late = True
                worker.child.process.kill()

    # Work

    def _call(self, requests: Sequence[TrainRequest], states: ClientStore) -> _Call:
        client, partition = self._workload.config.client, self._workload.partition
        units = [
            Unit(unit, sum(1 if client.local_steps else len(partition[request.partition]) for request in unit))
            for unit in chunks_of(requests, self._largest_unit)
        ]
        window = max(2 * len(self._workers), _WINDOW_BYTES // (self._largest_unit * self._model_bytes))
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
        job, tasks, layouts = _Job(call, {}), dict[_Key, int](), set[int]()
        send = worker.child.connection.send
        as_json: list[list[Any]] = []
        for unit in units:
            slot = self._replies.take()
            memory, start, clients = self._replies.lent(slot), 0, []
            for request in unit.requests:
                key, partition = call.keys[request.partition], request.partition
                if key not in call.tasks:
                    call.tasks[key] = self._task(request)
                try:
                    state = call.states.load(request) if call.tasks[key].has_state else None
                except DiskFullError:
                    raise
                except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
                    self._answer(call, unit, failure_of(partition, error))
                    continue
                number = None if state is None else self._write(state, memory[start:])
                clients.append([tasks.setdefault(key, len(tasks)), partition, request.state_version, number, start])
                if number is not None:
                    start += self._layouts[number].num_bytes
                    layouts.add(number)
            if clients:
                job.shares[len(as_json)] = _Share(unit, memory, len(clients))
                as_json.append([slot, start, clients])
        if not as_json:
            return
        for key in tasks:
            layouts.update(call.tasks[key].layouts)
        for number in sorted(layouts - worker.known):
            worker.known.add(number)
            send({"layout": number, "is": self._layouts[number].as_json()})
        if not worker.jobs:
            worker.heard_at = time.monotonic()
        worker.jobs[self._num_jobs] = job
        send({"job": self._num_jobs, "tasks": [call.tasks[key].as_json for key in tasks], "units": as_json})
        self._num_jobs += 1

    def _task(self, request: TrainRequest) -> _Task:
        """Write what a request brings into shared memory."""
        slot, objective = self._models.take(), request.objective
        memory = self._models.memory(slot)
        model = self._write(request.tensors, memory)
        shared = self._write(request.shared, memory[self._layouts[model].num_bytes :])
        try:
            has_state = bool(plugins.build("objective", objective.name, objective.settings).has_state)
        except Exception:  # noqa: BLE001 - what is wrong with it is each client's failure, and said there
            has_state = False
        self._num_tasks += 1
        how = [request.round, objective.name, dict(objective.settings)]
        return _Task(slot, [self._num_tasks, slot, model, shared, *how], (model, shared), has_state)

    def _write(self, tensors: Tensors, memory: Tensor) -> int:
        """Write tensors into a memory; returns the number of their layout."""
        layout = Layout.of(tensors)
        layout.write(tensors, memory)
        if layout not in self._layouts:
            self._layouts.append(layout)
        return self._layouts.index(layout)

    def _handle(self, worker: _Worker, message: Message) -> None:
        """A worker's message; see clients.workers.process."""
        match message:
            case {"ready": True}:
                worker.is_ready = True
            case {"layout": number, "is": found}:
                worker.layouts[number] = Layout.from_json(found)
            case {"full": sentence}:
                raise DiskFullError(sentence)
            case {"defect": sentence}:
                raise EngineError(f"a worker process could not go on: {sentence}")
            case {"job": number, "unit": place, "partitions": partitions}:
                job = worker.jobs[number]
                share = job.shares[place]
                if job.call in self._calls:
                    self._answer(job.call, share.unit, self._result(worker, job.call, share, message))
                else:
                    self._close(job.call, partitions)
                share.num_left -= len(partitions)
                if not share.num_left:
                    del job.shares[place]
                if not job.shares:
                    del worker.jobs[number]
            case _:
                raise EngineError(f"a worker process said {message}, which is not understood.")

    def _result(self, worker: _Worker, call: _Call, share: _Share, said: Message) -> Result:
        """A result whose tensors lie where the worker wrote them; the states that came with it are saved."""
        partitions = said["partitions"]
        if "failed" in said:
            return Failure(partition=partitions[0], reason=said["failed"], details=said["details"])
        start, parts = said["start"], []
        for number in (said["tensors"], said["extra"], *(number for _, _, number in said["states"])):
            parts.append(worker.layouts[number].read(share.memory[start:]))
            start += worker.layouts[number].num_bytes
        tensors, extra, *states = parts
        for (partition, version, _), state in zip(said["states"], states, strict=True):
            call.states.save(partition, version, state)
        alike: dict[str, Any] = {
            "round": said["round"], "tensors": tensors, "roles": self._roles, "has_state": said["has_state"], "extra": extra
        }  # fmt: skip
        if said["is_stack"]:
            return ReplyStack(
                partitions=partitions, num_examples=said["num_examples"], metrics=said["metrics"], **alike
            )
        metrics = {name: values[0] for name, values in said["metrics"].items()}
        return TrainReply(partition=partitions[0], num_examples=said["num_examples"][0], metrics=metrics, **alike)

    def _answer(self, call: _Call, unit: Unit, result: Result) -> None:
        """Clients are done; what is known already, from a worker that died later, is not said twice."""
        partitions = list(result.partitions) if isinstance(result, ReplyStack) else [result.partition]
        known = [place for place, partition in enumerate(partitions) if partition in unit.answered]
        if len(known) == len(partitions):
            return
        if known and isinstance(result, ReplyStack):
            result = result.without(known)
        new = [partition for partition in partitions if partition not in unit.answered]
        unit.answered.update(new)
        call.ready.append((unit, result))
        self._close(call, new)

    def _close(self, call: _Call, partitions: Iterable[int]) -> None:
        """These clients are done; a task that nobody is asked any more makes room."""
        for partition in partitions:
            key = call.keys[partition]
            call.num_open[key] -= 1
            if not call.num_open[key] and key in call.tasks:
                self._models.give_back(call.tasks.pop(key).slot)


def _environment() -> dict[str, str]:
    """What a worker finds besides: its mark, and large pages for large tensors, which glibc has to be told before it starts."""
    said = os.environ.get("GLIBC_TUNABLES", "")
    pages = [] if "glibc.malloc.hugetlb" in said else ["glibc.malloc.hugetlb=1"]
    return {WORKER_MARK: "1", "GLIBC_TUNABLES": ":".join([said] * bool(said) + pages)}


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
