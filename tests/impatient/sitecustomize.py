"""Shorter polling intervals in Flower's programs: `tests/conftest.py` adds this folder to child processes' PYTHONPATH.

Flower 1.41 has no options for them.  Its SuperNode sleeps 3 s when there is no message, and 0.5 s before it looks for a
reply again; a missing object is pulled again after 1 s; a lost server is retried after up to 20 s; a dead node or
client is noticed after 60 s.  A round of a tiny model would take 5 s, and a test of a fault a minute.
"""

import os
import sys
import time
from pathlib import Path

_PAUSES_S = {3: 0.1, 0.5: 0.05}
_sleep = time.sleep
_names = [Path(argument).name for argument in sys.orig_argv[:7]]

if "FEDSIGN_TEST_IS_PATIENT" in os.environ:
    pass
elif "flwr-serverapp" in _names or "clients.deployment.executor" in _names:
    from flwr.supercore import constant

    constant.PULL_INITIAL_BACKOFF = 0.05
    from flwr.supercore import heartbeat

    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = 10
elif "supernode" in _names:
    from flwr.common import constant as common
    from flwr.supercore import constant

    common.MAX_RETRY_DELAY = 2
    constant.PULL_INITIAL_BACKOFF = 0.05
    from flwr.supercore import heartbeat
    from flwr.supercore.corestate import in_memory_corestate
    from flwr.supernode import fleet_http_connection

    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = (
        10  # a node is missed after 20 s
    )
    in_memory_corestate.HEARTBEAT_PATIENCE = 2 / 3  # of 30 s: a client is missed after 20 s
    time.sleep = lambda seconds: _sleep(_PAUSES_S.get(seconds, seconds))
