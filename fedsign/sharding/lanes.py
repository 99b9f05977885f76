"""Lanes run collectives in the order in which they are started, on the caller's thread or asynchronously.

All ranks start the same collectives in the same order, so that they match, whatever lane runs them.  `start` returns a ticket:
wait for it before using the result; it raises what went wrong.

    Here       the caller, at once
    Thread     a thread: for gloo, whose sends and receives are waited for by a CPU
    Streamed   a stream of a GPU: for NCCL, whose sends and receives are kernels

What a work reads and writes is made, and let go of after its ticket was waited for, by the caller.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

Work = Callable[[], None]
_Jobs = SimpleQueue[tuple[Work, "Future[None]"] | None]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A collective that was started.  `wait` before using its result; raises its error or that of an earlier one."""

    wait: Callable[[], object]


class Here:
    """The caller itself; what goes wrong is raised at once."""

    def start(self, work: Work) -> Ticket:
        """Run this after everything that was started before."""
        work()
        return Ticket(lambda: None)


class Thread:
    """A thread of its own, which ends when nobody has the lane any more.

    After a failure nothing more is carried out, since the other ranks are somewhere else: every later ticket has the same failure.
    For tensors on a GPU it has a stream, and works once the caller's stream has come to where it was at the start.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._jobs: _Jobs = SimpleQueue()
        # a daemon: what hangs in a collective, because another rank is gone, must not keep the process
        threading.Thread(target=_carry_out, args=(self._jobs,), name="fedsign-collectives", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def start(self, work: Work) -> Ticket:
        """See Here."""
        if self._stream is not None:
            reached = torch.cuda.current_stream(self._device).record_event()
            work = partial(_on_stream, self._stream, reached, work)
        done: Future[None] = Future()
        self._jobs.put((work, done))
        return Ticket(done.result)


def _on_stream(stream: torch.cuda.Stream, reached: torch.cuda.Event, work: Work) -> None:
    with torch.cuda.stream(stream):
        stream.wait_event(reached)
        work()
        stream.synchronize()


def _carry_out(jobs: _Jobs) -> None:
    error: BaseException | None = None
    while (job := jobs.get()) is not None:
        work, done = job
        try:
            if error is None:
                work()
        except BaseException as found:  # noqa: BLE001 - raised where it is waited for
            error = found
        del job, work  # and with it the tensors, before somebody is told
        done.set_result(None) if error is None else done.set_exception(error)
        del done  # the caller's


class Streamed:
    """A stream of a GPU beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, work: Work) -> Ticket:
        """See Here; the stream goes on from where the caller's stands, and who waits lets the caller's stream wait."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        reached = self._stream.record_event()
        return Ticket(lambda: torch.cuda.current_stream(self._device).wait_event(reached))


Lane = Here | Thread | Streamed
