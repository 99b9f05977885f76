"""Executors run collectives in the order in which they are started, inline or asynchronously.

All ranks start the same collectives in the same order, so they match under any executor.  `start` returns a `Work`, as
in torch.distributed: wait for it before using the result; `wait` raises the collective's error.

    Inline       the calling thread, synchronously
    Thread       a thread, for gloo, whose sends and receives block a CPU thread
    CudaStream   a CUDA stream, for NCCL, whose sends and receives are kernels

The caller must keep a job's tensors alive until it has waited.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

Job = Callable[[], None]
_Jobs = SimpleQueue[tuple[Job, "Future[None]"] | None]


@dataclass(frozen=True, slots=True)
class Work:
    """A started collective.  `wait` before using its result; it raises its error or an earlier one."""

    wait: Callable[[], object]


class Inline:
    """Runs jobs in the calling thread; errors are raised by `start`."""

    def start(self, job: Job) -> Work:
        """Run a job after all earlier ones."""
        job()
        return Work(lambda: None)


class Thread:
    """Runs jobs in a dedicated thread, which ends with the executor.

    After a failure no more jobs run, since the other ranks are elsewhere in the program; later work raises the same
    error.  For CUDA tensors the thread has its own stream, which first waits for the caller's stream as of `start`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._jobs: _Jobs = SimpleQueue()
        # a daemon, so that a collective that hangs on a lost rank does not keep the process alive
        threading.Thread(target=_carry_out, args=(self._jobs,), name="fedsign-collectives", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)  # possible because the thread refers to the queue only

    def start(self, job: Job) -> Work:
        """Queue a job."""
        if self._stream is not None:
            reached = torch.cuda.current_stream(self._device).record_event()
            job = partial(_on_stream, self._stream, reached, job)
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return Work(done.result)


def _on_stream(stream: torch.cuda.Stream, reached: torch.cuda.Event, job: Job) -> None:
    with torch.cuda.stream(stream):
        stream.wait_event(reached)
        job()
        stream.synchronize()  # the waiter gets no event, so results must be complete when the job is


def _carry_out(jobs: _Jobs) -> None:
    error: BaseException | None = None
    while (item := jobs.get()) is not None:
        job, done = item
        try:
            if error is None:
                job()
        except BaseException as raised:  # noqa: BLE001 - raised where it is waited for
            error = raised
        del item, job  # release the tensors before the waiter continues
        done.set_result(None) if error is None else done.set_exception(error)
        del done  # belongs to the caller


class CudaStream:
    """Enqueues jobs on a CUDA stream beside the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, job: Job) -> Work:
        """Enqueue a job after the caller's stream; `wait` makes the caller's stream wait, not the CPU."""
        # the collective reads what the compute stream has enqueued so far
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            job()
        reached = self._stream.record_event()
        return Work(lambda: torch.cuda.current_stream(self._device).wait_event(reached))


Executor = Inline | Thread | CudaStream
