"""SIGTERM and SIGHUP, which batch systems, service managers, and closed terminals send before they kill.

A command ends as by Ctrl-C, with exit code 128 plus the signal's number.  A run finishes its round first, for
`PATIENCE_S` at the most, and leaves a checkpoint of it.  A second signal ends at once, unless it comes with the first:
a shell passes on the SIGHUP that the kernel sends as well.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 20.0  # less than the 30 s of Slurm and Kubernetes
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_TOGETHER_S = 0.5
received: list[signal.Signals] = []  # with one, a run is to end with its round
_received_at: list[float] = []
_rounds: list[bool] = []  # an entry for each round loop that runs


class Ended(KeyboardInterrupt):
    """Raised in the main thread on a signal, or at the end of its round."""

    def __init__(self) -> None:
        super().__init__(f"stopped by {received[0].name}" if received else "stopped from outside")


def heed() -> None:
    """From now on, heed these signals; a command started with nohup goes on ignoring SIGHUP."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _receive)


def exit_code() -> int:
    """The exit code of a command that was stopped."""
    return 128 + (received[0] if received else signal.SIGINT)


@contextmanager
def whole_rounds() -> Iterator[None]:
    """A context manager around a round loop, which looks at `received` after each round and raises `Ended`."""
    _rounds.append(True)
    try:
        yield
    except Exception as error:
        if not received:
            raise
        raise Ended from error  # a group's processes get the signal, too, and a round may fail for want of them
    finally:
        _rounds.pop()
        if received:
            signal.setitimer(signal.ITIMER_REAL, 0)  # Python ends without its handlers: the alarm would kill it


def _receive(number: int, frame: FrameType | None) -> None:
    if received:
        if time.monotonic() - _received_at[0] > _TOGETHER_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        return
    received.append(signal.Signals(number))
    _received_at.append(time.monotonic())
    if not _rounds:
        raise Ended
    signal.signal(signal.SIGALRM, _lose_patience)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)


def _lose_patience(number: int, frame: FrameType | None) -> None:
    if _rounds:
        raise Ended
