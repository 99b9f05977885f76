"""Executors run collectives in the order in which they are started, inline or asynchronously.

All ranks start the same collectives in the same order, so they match whichever executor runs them.  `start` returns a `Work`, as
torch.distributed does: wait for it before using the result; `wait` raises the collective's error.

    Inline       the calling thread, at once
    Thread       a thread: for gloo, whose sends and receives block a CPU
    CudaStream   a CUDA stream: for NCCL, whose sends and receives are kernels

The caller owns a job's tensors, and keeps them until it has waited.
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
    """A collective that was started.  `wait` before using its result; raises its error or that of an earlier one."""

    wait: Callable[[], object]


class Inline:
    """The calling thread; errors are raised at once."""

    def start(self, job: Job) -> Work:
        """Run this after everything that was started before."""
        job()
        return Work(lambda: None)


class Thread:
    """A thread of its own, which ends with the executor.

    After a failure nothing more runs, since the other ranks are elsewhere in the program: every later work has the same error.
    For CUDA tensors the thread has a stream, which waits for what the caller's stream held at the start.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._jobs: _Jobs = SimpleQueue()
        # a daemon: what hangs in a collective, because another rank is gone, must not keep the process
        threading.Thread(target=_carry_out, args=(self._jobs,), name="fedsign-collectives", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def start(self, job: Job) -> Work:
        """See Inline."""
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
        stream.synchronize()


def _carry_out(jobs: _Jobs) -> None:
    error: BaseException | None = None
    while (item := jobs.get()) is not None:
        job, done = item
        try:
            if error is None:
                job()
        except BaseException as found:  # noqa: BLE001 - raised where it is waited for
            error = found
        del item, job  # and with them the tensors, before the waiter is told
        done.set_result(None) if error is None else done.set_exception(error)
        del done  # the caller's


class CudaStream:
    """A stream of a GPU beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, job: Job) -> Work:
        """See Inline; the stream goes on from where the caller's stands, and who waits lets the caller's stream wait."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            job()
        reached = self._stream.record_event()
        return Work(lambda: torch.cuda.current_stream(self._device).wait_event(reached))


Executor = Inline | Thread | CudaStream
