"""End the process of a client that hangs.

A client that trains for too long reports it itself between two steps.  One that hangs within a step can only be ended
with its process; on a SuperNode, the next message would otherwise wait forever.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_GRACE_S = 5.0  # after the server has given up and the client could have reported it
EXIT_CODE = 70  # EX_SOFTWARE


@contextmanager
def ended_after(timeout_s: float) -> Iterator[None]:
    """Abruptly end this process if the block exceeds `timeout_s` plus a grace period; files on disk stay consistent."""
    if timeout_s + _GRACE_S >= threading.TIMEOUT_MAX:  # a Timer cannot wait longer, and the timeout may be infinite
        yield
        return
    timer = threading.Timer(timeout_s + _GRACE_S, os._exit, args=(EXIT_CODE,))  # sys.exit would end only its thread
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
