"""Processes of our own, which are asked and answer in lines of JSON over pipes.

They are started as commands of their own, not by `multiprocessing`: a user's script needs no
`if __name__ == "__main__"`, and a notebook works too.  What goes over the pipes is text; nothing is pickled.

A child ends as soon as the other end of its input is closed, which the system does when the process that started
it dies, however it dies.  What a child prints goes to its log: its standard output is for the answers.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, TypeVar, cast

from fedsign.errors import EngineError

Message = dict[str, Any]

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.stdin.readline())
from fedsign.processes import serve
serve(sys.argv[1])
"""
_LASTING = """
import importlib, json, sys
sys.path[:] = json.loads(sys.stdin.readline())
given = json.loads(sys.stdin.readline())
importlib.import_module(sys.argv[1]).main(given)
"""
_PATIENCE_S = 10.0
_LOOKS_EVERY_S = 1.0
_CHUNK_BYTES = 2**18


def refuse_within(mark: str, process: str) -> None:
    """Let no process that has a mark in its environment start what would start others like it.

    Raises:
        EngineError: this is one.
    """
    if os.environ.get(mark):
        raise EngineError(
            f"{process} was made to play a run, by a module that plays one when it is imported; put that "
            'under `if __name__ == "__main__":`.'
        )


class Audible(Protocol):
    """What may say something, or end: a child, a connection."""

    def fileno(self) -> int:
        """What becomes readable when there is something to be heard, or when it has ended."""


AudibleT = TypeVar("AudibleT", bound=Audible)


class Child:
    """A process that runs `main(parent)` of a module, seen from the process that started it."""

    def __init__(
        self, module: str, *, log: Path, shared: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """`shared` are file descriptors that the child gets, under the same numbers."""
        self.log = log
        with log.open("ab") as file:
            # a session of its own: Ctrl-C is for the command, which ends its children
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                start_new_session=True,
                pass_fds=shared,
                env=os.environ | (environment or {}),
            )
        # `Popen` was asked for both pipes
        self._stdin, self._stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._begun = b""  # of a line
        self.say(sys.path)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def fileno(self) -> int:
        """What becomes readable when there is something to be heard, or when the process has ended."""
        return self._stdout.fileno()

    def say(self, message: object) -> None:
        """Send a line; one to a process that has died is lost."""
        _write(self._stdin, message)

    def hear(self) -> list[Message | None]:
        """What has come by now, after waiting for something; at the end, once all was heard, None."""
        found = os.read(self.fileno(), _CHUNK_BYTES)
        if not found:
            return [None]
        *lines, self._begun = (self._begun + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        """Ask the process to end, and do not wait."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process, and do not wait."""
        self._process.kill()

    def end(self) -> None:
        """Ask the process to end, then insist."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with suppress(BrokenPipeError):
                pipe.close()

    def epitaph(self) -> str:
        """How a process that has closed its output came to its end, as the middle of a sentence."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self.end()
        code = self._process.returncode
        memory = ", for want of memory perhaps" if code == -signal.SIGKILL else ""
        return f"was ended by signal {-code}{memory}" if code < 0 else f"ended with code {code}"


class Lasting:
    """A process that runs `main(given)` of a module; that it ends with this one is its own affair, by its standard input or otherwise."""

    def __init__(self, module: str, given: Message, *, log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _LASTING, module],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                bufsize=0,
                start_new_session=True,
            )
        self._stdin = cast(IO[bytes], self._process.stdin)  # `Popen` was asked for it
        _write(self._stdin, sys.path)
        _write(self._stdin, given)

    @property
    def code(self) -> int | None:
        """With which it has ended, if it has."""
        return self._process.poll()

    def let_go(self) -> None:
        """Close its standard input."""
        self._stdin.close()

    def end(self) -> None:
        """Close its standard input, and wait for it to end with that."""
        self.let_go()
        self._process.wait()


def audible(them: Iterable[AudibleT], timeout_s: float | None = None) -> list[AudibleT]:
    """Those that have said something or have ended; waits for the first one, `timeout_s` at most."""
    poll = select.poll()
    known = {each.fileno(): each for each in them}
    for number in known:
        poll.register(number, select.POLLIN)
    return [known[number] for number, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)]


def _write(pipe: IO[bytes], message: object) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    with suppress(BrokenPipeError):
        while line:  # a signal may cut a write short
            line = line[pipe.write(line) :]


class Parent:
    """The process that started this one, seen from here."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(self, *, flush: bool = True, **message: Any) -> None:
        """Send a line; without `flush`, with the next one that is."""
        self._answers.write(json.dumps(message) + "\n")
        if flush:
            self._answers.flush()

    def requests(self) -> Iterator[Message]:
        """Line after line, to the end."""
        return map(json.loads, sys.stdin)


def serve(module: str) -> None:
    """Let a module's `main` answer the process that started this one."""
    parent = Parent()
    try:
        importlib.import_module(module).main(parent)
    except KeyboardInterrupt:
        sys.exit(130)


def end_when_orphaned(other: int | None = None) -> None:
    """From now on, end this process when the one that started it has died, or another one whose id is given.

    For processes of Flower's, which ask the main thread to end: while it speaks to a SuperLink that is gone, it does not hear
    and tries for ever.  What is on disk is whole at any moment.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and (other is None or Path(f"/proc/{other}").exists()):
            time.sleep(_LOOKS_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end_with_parent() -> NoReturn:
    """Wait until nobody can write to standard input any more; then nobody is left to answer to."""
    poll = select.poll()
    poll.register(0, 0)  # of the input itself it is not told, only of its end
    poll.poll()
    os._exit(0)  # what is on disk is whole at any moment
