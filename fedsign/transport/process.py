"""Child processes that are spoken to over a connection.

They are commands of their own, not `multiprocessing`'s: a user's script needs no `if __name__ == "__main__"`, and a notebook works too.
A child's standard input is its end of a socket pair, which it moves away first; what it prints goes to its log.

A child ends when its parent does, however the parent ends: the kernel closes the parent's end of the socket pair.
"""

import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedsign import companions
from fedsign.transport.connection import Connection

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from fedsign.transport.process import serve
serve(*sys.argv[1:])
"""
_TERMINATION_S = 10.0


class ChildProcess:
    """A process that runs `main(parent: Connection)` of a module, seen from its parent; it ends when nothing refers to it any more."""

    def __init__(
        self,
        module: str,
        *,
        log: Path,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        ends_with: int | None = None,
    ) -> None:
        """Start it.

        Args:
            descriptors: Open files that it inherits under the same numbers.
            environment: Variables that it gets in addition to those of this process.
            ends_with: The process with which it ends, if that is not this one.
        """
        self.log = log
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours)
        try:
            with theirs, log.open("ab") as file:
                # a session of its own: Ctrl-C is for the command, which ends its children
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, module, str(ends_with or ""), json.dumps(sys.path)],
                    stdin=theirs.fileno(),
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    pass_fds=descriptors,
                    env=os.environ | (environment or {}),
                )
        except BaseException:
            self.connection.close()
            raise
        self._end = weakref.finalize(self, _close, self.process, self.connection)
        if ends_with is not None:
            self._end.detach()

    def close(self) -> None:
        """End it, unless it ends with another process: ask, then insist."""
        if self._end.alive:
            _close(self.process, self.connection)
            self._end.detach()  # only now: Ctrl-C may have interrupted it

    def exit_reason(self) -> str:
        """How a process whose connection is lost has ended, as the middle of a sentence."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_TERMINATION_S)
        self.close()
        code = self.process.returncode
        memory = ", for want of memory perhaps" if code == -signal.SIGKILL else ""
        return f"was ended by signal {-code}{memory}" if code < 0 else f"ended with code {code}"


def close_all(children: Collection[ChildProcess]) -> None:
    """End them at once, and wait for each."""
    for child in children:
        child.process.terminate()
    for child in children:
        child.close()


def serve(module: str, ends_with: str) -> None:
    """Run a module's `main` in a child process."""
    parent = Connection(socket.socket(fileno=os.dup(0)))
    with open(os.devnull) as nothing:  # noqa: PTH123 - what reads standard input must not take messages away
        os.dup2(nothing.fileno(), 0)
    if ends_with:
        end_with(int(ends_with))
    else:
        _end_after(parent.fileno(), 0)  # data are not reported, only the end
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    companions.import_packages()
    try:
        importlib.import_module(module).main(parent)
    except KeyboardInterrupt:
        sys.exit(130)


def _close(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TERMINATION_S)
    process.kill()
    process.wait()
    connection.close()


def end_with(process: int) -> None:
    """From now on, end this process when another one has ended.  What is on disk is whole at any moment.

    Flower's processes need this: a main thread that retries a SuperLink that is gone does not notice a request to end.
    """
    try:
        _end_after(os.pidfd_open(process), select.POLLIN)
    except ProcessLookupError:
        os._exit(1)


def _end_after(descriptor: int, event: int) -> None:
    poller = select.poll()
    poller.register(descriptor, event)

    def wait() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
