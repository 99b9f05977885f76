"""What a SuperLink or SuperNode prints, in files that do not grow without end (`fedsign deploy logs`).

`python -m simulations.deployment.logs FILE` copies what comes in to its own output, and with the time of each line to FILE.
"""

import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, cast

_MAX_BYTES, _NUM_BEFORE = 10 * 2**20, 3
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def log_of(folder: Path) -> Path:
    """Of the program that was started from a folder: the server's, or a site's kit."""
    return folder / "logs" / "log"


def keep(folder: Path) -> None:
    """From now on, what this process and all that it becomes and starts print goes into the folder's log, too."""
    log_of(folder).parent.mkdir(exist_ok=True)
    command = [sys.executable, "-P", "-m", "simulations.deployment.logs", str(log_of(folder))]
    # a session of its own: Ctrl-C is for the program, whose last words count
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    with cast(IO[bytes], keeper.stdin) as pipe:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(pipe.fileno(), stream.fileno())


def main(path: str) -> None:
    """See the module; ends when nobody writes any more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to all, but the program's last words count
    log = logging.Logger("log")
    handler = RotatingFileHandler(path, maxBytes=_MAX_BYTES, backupCount=_NUM_BEFORE, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    for line in sys.stdin.buffer:
        with suppress(OSError):  # the terminal is gone
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        log.info("%s", _COLORS.sub("", line.decode(errors="replace").rstrip()))


if __name__ == "__main__":
    main(sys.argv[1])
