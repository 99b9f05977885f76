"""Short pauses in Flower's programs: `tests/conftest.py` puts this folder on the PYTHONPATH of the processes that tests start.

Flower 1.41 has no options for them.  Its SuperNode sleeps 3 s when there is no message, and 0.5 s before it looks for a reply again;
an object that has not arrived yet is pulled again after 1 s; a server that is gone is tried again after up to 20 s; a process that died
is missed after 60 s.  So a round of a tiny model would take 5 s, and a test of a fault a minute.
"""

import sys
import time
from pathlib import Path

_PROGRAMS = {
    "clients.executor",
    "flower-superexec",
    "flower-superlink",
    "flower-supernode",
    "flwr-serverapp",
    "simulations.deployment.gate",
}
_PAUSES_S = {3: 0.1, 0.5: 0.05}
_sleep = time.sleep
_program = _PROGRAMS.intersection(Path(argument).name for argument in sys.orig_argv[:4])

if _program:
    from flwr.common import constant as common
    from flwr.supercore import constant

    constant.PULL_INITIAL_BACKOFF = 0.05
    common.HEARTBEAT_DEFAULT_INTERVAL = common.HEARTBEAT_MIN_INTERVAL  # 10 s: missed after 20 s
    common.MAX_RETRY_DELAY = 2
if _program == {"flower-supernode"}:
    time.sleep = lambda seconds: _sleep(_PAUSES_S.get(seconds, seconds))
