"""Locate Flower's programs, and tie their lifetime to that of the process that starts them."""

import os
import shutil
import sys
from pathlib import Path
from typing import BinaryIO

from fedsign.errors import EngineError

# A wrapper script that kills its process group when the starting process dies, however that happens: a Flower program
# that is interrupted while sending waits forever for a SuperLink that is gone.
_BOUND = """
import os, runpy, select, signal, sys, threading

def end_with(process):
    poller = select.poll()
    poller.register(process, select.POLLIN)
    poller.poll()
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with, args=[os.pidfd_open(int(sys.argv[1]))], daemon=True).start()
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def find_program(name: str) -> str:
    """The path of one of Flower's console scripts, beside this interpreter or on PATH."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise EngineError(f"the program '{name}', which comes with flwr, was not found; reinstall flwr.")
    return path


def bound(script: str) -> list[str]:
    """A command that runs a Python script until this process ends; start it in a new session."""
    return [sys.executable, "-P", "-c", _BOUND, str(os.getpid()), script]


def guarded(server: str) -> list[str]:
    """A command that runs Flower's `superlink` or `supernode` behind the door, until this process ends."""
    return [*bound(str(Path(__file__).with_name("door.py"))), server]


def unseen(secret: str) -> BinaryIO:
    """A file in memory, for a program's standard input: every account may read command lines."""
    file = os.fdopen(os.memfd_create("secret"), "w+b")
    file.write(secret.encode())
    file.seek(0)
    return file
