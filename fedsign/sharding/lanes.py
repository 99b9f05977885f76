"""Who carries out collectives, one after another in the order in which they were handed over: the caller, or somebody beside it.

All ranks hand over the same collectives in the same order, so those of one rank meet those of the others, whoever carries them out.
What was handed over gives a ticket; whoever uses what comes of it waits for that, and hears there what went wrong.

    Here       the caller, at once
    Thread     a thread: for gloo, whose sends and receives are waited for by a CPU
    Streamed   a stream of a GPU: for NCCL, whose sends and receives are kernels

What a work reads and writes is made, and let go of after its ticket was waited for, by the caller.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

Work = Callable[[], None]


class Ticket(Protocol):
    """What was handed over."""

    def wait(self) -> None:
        """Until what comes of it may be used; raises what went wrong in it, or in what was handed over before."""


class Lane(Protocol):
    """See the module."""

    def start(self, work: Work) -> Ticket:
        """Have something carried out after all that was handed over before."""


class _Done:
    """Of what was carried out at once."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class Here:
    """The caller itself; what goes wrong is raised at once."""

    def start(self, work: Work) -> Ticket:
        """See Lane."""
        work()
        return _Done()


class Thread:
    """A thread of its own, which ends when nobody has the lane any more.

    After a failure nothing more is carried out, since the other ranks are somewhere else: every later ticket has the same failure.
    For tensors on a GPU it has a stream, and works once the caller's stream has come to where it was at the start.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # a daemon: what hangs in a collective, because another rank is gone, must not keep the process
        threading.Thread(target=_carry_out, args=(self._jobs,), name="fedsign-collectives", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def start(self, work: Work) -> Ticket:
        """See Lane."""
        if self._stream is not None:
            reached = torch.cuda.current_stream(self._device).record_event()
            work = partial(_on_stream, self._stream, reached, work)
        job = _Job(work)
        self._jobs.put(job)
        return job


def _on_stream(stream: torch.cuda.Stream, reached: torch.cuda.Event, work: Work) -> None:
    with torch.cuda.stream(stream):
        stream.wait_event(reached)
        work()
        stream.synchronize()


class _Job:
    """A work, and its ticket."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._error: BaseException | None = None
        self._done = threading.Event()

    def carry_out(self, error: BaseException | None) -> BaseException | None:
        """Do it, if nothing went wrong before; what has gone wrong."""
        work, self._work = self._work, None
        if error is None and work is not None:
            try:
                work()
            except BaseException as found:  # noqa: BLE001 - raised where it is waited for
                error = found
        del work  # and with it the tensors, before somebody is told
        self._error = error
        self._done.set()
        return error

    def wait(self) -> None:
        """See Ticket."""
        self._done.wait()
        if self._error is not None:
            raise self._error


def _carry_out(jobs: "SimpleQueue[_Job | None]") -> None:
    error = None
    while (job := jobs.get()) is not None:
        error = job.carry_out(error)
        del job  # its ticket is the caller's


class Streamed:
    """A stream of a GPU beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, work: Work) -> Ticket:
        """See Lane; the stream goes on from where the caller's stands."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        return _Reached(self._device, self._stream.record_event())


class _Reached:
    """A place in a stream."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        """Let the caller's stream wait; the caller goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
