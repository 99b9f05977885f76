"""A site: Flower's SuperNode, and the process in which its clients train.

    python -m clients.site --superlink HOST:PORT --root-certificates ca.crt --node-config 'partition-id=0' ...

It takes the arguments of `flower-supernode`, except `--isolation`.  Site and SuperNode end together; a training process
that dies is restarted.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from fedsign.errors import EngineError, FedSignError
from fedsign.flower.programs import guarded
from fedsign.transport.process import ending

_POLL_INTERVAL_S = 0.2
_PATIENCE_S = 5.0
_PAUSE_S, _LONG_PAUSE_S, _YOUNG_S = 0.5, 10.0, 5.0  # pause before a restart, longer for processes that died young
_log = logging.getLogger("fedsign")


def main(arguments: Sequence[str]) -> int:
    """Run a site until its SuperNode ends; return the SuperNode's exit code.

    Raises:
        EngineError: `--isolation` was given.
    """
    if any(argument.partition("=")[0] == "--isolation" for argument in arguments):
        raise EngineError("--isolation was given, which a site sets by itself; drop it, or start flower-supernode.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # raises SystemExit, so that `finally` ends both processes
    node = _start([*guarded("supernode"), *arguments, "--isolation", "process"])
    module = "clients.deployment.executor"
    # -P: no file in the current folder may hide a module.  The executor ends with this process, even if it is killed.
    train = [sys.executable, "-P", "-m", module, _runtime_address(arguments), str(os.getpid())]
    executor, began_at = _start(train), time.monotonic()
    try:
        while node.poll() is None:
            if executor.poll() is not None:
                _log.warning("the training process %s; another takes its place", ending(executor.returncode))
                time.sleep(_PAUSE_S if time.monotonic() - began_at > _YOUNG_S else _LONG_PAUSE_S)
                executor, began_at = _start(train), time.monotonic()
            time.sleep(_POLL_INTERVAL_S)
        return node.returncode
    finally:
        node.terminate()
        executor.terminate()
        with suppress(subprocess.TimeoutExpired):
            node.wait(_PATIENCE_S)  # lets it sign off; whatever remains ends with this process


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    # a session of its own: Ctrl-C reaches only this process, and `bound` kills its whole process group
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _runtime_address(arguments: Sequence[str]) -> str:
    """The address at which a SuperNode with these arguments hands out tasks."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (("--host", "127.0.0.1"), ("--port", "9094")):  # Flower's
        parser.add_argument(name, nargs="?", default=default, const=default)
    known, _ = parser.parse_known_args(arguments)
    return f"{known.host}:{known.port}"


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    os.umask(0o077)  # models and clients' states
    try:
        sys.exit(main(sys.argv[1:]))
    except FedSignError as error:
        sys.exit(f"Error: {error}")
