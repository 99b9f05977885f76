"""Logs of SuperLinks and SuperNodes, in files of bounded size (`fedsign deploy logs`).

`python -m simulations.deployment.logs FILE [HOST PORT [CA]]` copies its input to its output, and with timestamps to
FILE.  When a SuperNode says that it does not reach its server, a sentence says what is wrong with that.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, cast

_MAX_BYTES, _NUM_BEFORE = 10 * 2**20, 3
_LOST = (b"Connection attempt failed", b"handshake error")  # what Flower says
_EVERY_S = 300.0
_COLORS = re.compile(r"\x1b\[[0-9;]*m")  # Flower's log is colored even in a pipe


def log_of(folder: Path) -> Path:
    """Return the log of the program started from a folder: the server's, or a site's kit."""
    return folder / "logs" / "log"


def keep(folder: Path, *server: str) -> None:
    """From now on, also write the output of this process and its children to the folder's log."""
    log_of(folder).parent.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", "simulations.deployment.logs", str(log_of(folder)), *server]
    # in a session of its own, so that Ctrl-C does not end it before the program's last output
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    # closed here, so that the keeper sees end-of-file when the last program with a duplicate has ended
    with cast(IO[bytes], keeper.stdin) as pipe:
        for stream in (sys.stdout, sys.stderr):
            # text still buffered would otherwise follow later lines, or be lost by exec
            stream.flush()
            os.dup2(pipe.fileno(), stream.fileno())


def main(path: str, *server: str) -> None:
    """Copy standard input until all writers have closed it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd signals all; the program's last output comes later
    # not getLogger: no handler of the root logger may print the lines again
    log = logging.Logger("log")
    handler = RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=_NUM_BEFORE, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    told_at = -_EVERY_S
    # bytes: a program may print anything, and one bad character must not end the log
    for line in sys.stdin.buffer:
        with suppress(OSError):  # the terminal is gone
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        log.info("%s", _COLORS.sub("", line.decode(errors="replace").rstrip()))
        if server and any(words in line for words in _LOST) and time.monotonic() - told_at >= _EVERY_S:
            told_at = time.monotonic()
            if sentence := _trouble_with(*server):
                log.warning("fedsign: %s", sentence)
                with suppress(OSError):
                    print(f"fedsign: {sentence}", flush=True)


def _trouble_with(host: str, port: str, authority: str = "") -> str:
    from simulations.deployment.probe import ServerError, probe_server  # rarely needed

    try:
        probe_server(host, int(port), authority=Path(authority) if authority else None)
    except ServerError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
