"""Child processes with a connection to their parent.

They are started as commands, without `multiprocessing`, so user scripts need no `if __name__ == "__main__"`, and
notebooks work.  A child's standard input is its end of a socket pair, which it moves to another descriptor first.  Its
output goes to its log.

A child ends with its parent, however the parent ends: the kernel then closes the parent's end of the socket pair.
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
from fedsign.errors import OUT_OF_MEMORY
from fedsign.transport.connection import Connection

# with the parent's sys.path, so that both find the same modules of the user
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from fedsign.transport.process import serve
serve(*sys.argv[1:])
"""
_TERMINATION_S = 10.0


class ChildProcess:
    """A process that runs a module's `main(parent: Connection)`; it is ended when this object is garbage-collected."""

    def __init__(
        self,
        module: str,
        *,
        log: Path,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        ends_with: int | None = None,
    ) -> None:
        """Start the process.

        Args:
            descriptors: Open files that it inherits under the same numbers.
            environment: Additional environment variables.
            ends_with: The process with which it ends; this one by default.
        """
        self.log = log
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours)
        try:
            with theirs, log.open("ab") as file:
                # its own session, so that Ctrl-C reaches only the parent, which ends its children
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
        if ends_with is not None:  # then it outlives this object
            self._end.detach()

    def close(self) -> None:
        """Terminate the process, and kill it after a grace period, unless it ends with another process."""
        if self._end.alive:
            _close(self.process, self.connection)
            self._end.detach()  # only now, since Ctrl-C may interrupt _close

    def exit_reason(self) -> str:
        """How a process whose connection was lost has ended, as part of a sentence."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_TERMINATION_S)
        self.close()
        code = self.process.returncode
        return ending(code)


def ending(code: int) -> str:
    """How a process with this exit code has ended, as part of a sentence."""
    memory = f", {OUT_OF_MEMORY}" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code}{memory}" if code < 0 else f"ended with code {code}"


def close_all(children: Collection[ChildProcess]) -> None:
    """Terminate all children, then wait for each."""
    for child in children:
        child.process.send_signal(signal.SIGINT)
    for child in children:
        child.close()


def serve(module: str, ends_with: str) -> None:
    """Run a module's `main` in a child process."""
    parent = Connection(socket.socket(fileno=os.dup(0)))
    with open(os.devnull) as nothing:  # noqa: PTH123 - code that reads standard input must not consume messages
        os.dup2(nothing.fileno(), 0)
    if ends_with:
        end_with(int(ends_with))
    else:
        _end_after(parent.fileno(), 0)  # wait for hang-up only, not for data
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP):  # batch systems send them to all: the parent decides
        signal.signal(number, lambda *given: None)
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    companions.import_packages()
    try:
        importlib.import_module(module).main(parent)
    except KeyboardInterrupt:
        sys.exit(130)


def _close(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TERMINATION_S)
    process.kill()
    process.wait()
    connection.close()


def end_with(process: int) -> None:
    """From now on, end this process abruptly when another one ends; files on disk stay consistent.

    Flower's processes need this: a main thread that keeps retrying a lost SuperLink ignores requests to end.
    """
    try:
        _end_after(os.pidfd_open(process), select.POLLIN)
    except ProcessLookupError:  # it has ended already
        os._exit(1)


def _end_after(descriptor: int, event: int) -> None:
    poller = select.poll()
    poller.register(descriptor, event)

    def wait() -> None:
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
