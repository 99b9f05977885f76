"""The daemon beside a node that keeps the ranks of sharded clients between messages (see clients.sharding.node).

It gets its settings in one message from the process that started it, then serves clients one by one on its socket.

It ends with the process that it is bound to: the one that started it, or another one (`ChildProcess.ends_with`).  It
also ends when it is told that the run is over, or after `idle_s` seconds without a request, since a killed server shuts
nothing down while the node may live on for other runs.  Its ranks end with it.
"""

import logging
import socket
from contextlib import closing
from pathlib import Path

from clients.sharding.group import ShardGroup
from clients.state.store import ClientStore
from clients.workers.messages import request_from, result_message
from clients.workers.shared_data import workload_from
from fedsign.errors import EngineError
from fedsign.records import Failure
from fedsign.transport.connection import Connection
from fedsign.transport.tensors import receive_tensors, send_tensors

_REQUEST_S = 10.0
_log = logging.getLogger(__name__)


def main(parent: Connection) -> None:
    """Serve requests until the run is over or the daemon is idle."""
    given = next(iter(parent))
    with socket.socket(fileno=given["server"]) as server:
        server.settimeout(given["idle_s"])
        with closing(ShardGroup(workload_from(given), logs=Path(given["logs"]))) as group:
            try:
                while _answer(Connection(server.accept()[0]), group, server):
                    pass
            except TimeoutError:
                server.close()  # first, so that a new request starts another daemon
                group.part(is_over=False)  # joined machines then look for the next daemon


def _answer(connection: Connection, group: ShardGroup, server: socket.socket) -> bool:
    """Serve one request; False if it was the last one."""
    with closing(connection):
        try:
            connection.check_same_user()
        except EngineError as error:
            _log.warning("%s", error)
            return True
        with connection.deadline(_REQUEST_S):  # a silent peer must not block others
            received = receive_tensors(connection, max_bytes=group.max_request_bytes)
        if received is None:
            return True
        if "end" in received[0]:
            server.close()  # before replying, since another run may follow at once
            group.part(is_over=True)  # before replying, since this process may end with the peer
            return False
        (result,) = group.train_many([request_from(*received)], ClientStore(Path()))
        send_tensors(connection, result_message(result), {} if isinstance(result, Failure) else result.tensors)
    return True
