"""The end of a process whose client hangs, where a server is waiting for it in vain.

A client that trains for too long says so itself between two steps.  One that hangs within a step can only be ended with its
process; on a SuperNode the next message would wait for it for ever.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_GRACE_S = 5.0  # first the server gives up, then the client says so, then this
EXIT_CODE = 70  # EX_SOFTWARE


@contextmanager
def ended_after(timeout_s: float) -> Iterator[None]:
    """End this process, abruptly, if the block takes longer than `timeout_s` and a grace; what is on disk is whole at any moment."""
    if timeout_s + _GRACE_S >= threading.TIMEOUT_MAX:
        yield
        return
    timer = threading.Timer(timeout_s + _GRACE_S, os._exit, args=(EXIT_CODE,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
