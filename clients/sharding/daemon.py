"""The process beside a node that keeps its sharded clients' ranks between messages: see clients.sharding.node.

In, from the process that started it: one message, what to be.  Then it answers on its socket, one client after another.

It ends with what it was bound to, however that ends: the process that started it, or another one (`ChildProcess.ends_with`).  It ends, too, when it is told that the run is over, or when nobody has asked for anything for a
while (`idle_s`): a server that was killed shuts nothing down, and the node may last for other runs.  Its ranks end with it.
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
    """Answer until there is nobody left to answer to."""
    given = next(iter(parent))
    with socket.socket(fileno=given["server"]) as server:
        server.settimeout(given["idle_s"])
        with closing(ShardGroup(workload_from(given), logs=Path(given["logs"]))) as group:
            try:
                while _answer(Connection(server.accept()[0]), group, server):
                    pass
            except TimeoutError:
                server.close()  # before the ranks end: whoever asks now starts another one
                group.part(is_over=False)


def _answer(connection: Connection, group: ShardGroup, server: socket.socket) -> bool:
    """One client; an asker that is gone meanwhile is not told.  False where there will be no other."""
    with closing(connection):
        try:
            connection.check_same_user()
        except EngineError as error:
            _log.warning("%s", error)
            return True
        with connection.deadline(_REQUEST_S):  # one that asks nothing must not keep others waiting
            found = receive_tensors(connection, max_bytes=group.max_request_bytes)
        if found is None:
            return True
        if "end" in found[0]:
            server.close()  # before the asker is let go, which may be followed by another run
            group.part(is_over=True)  # and before this process ends with the asker
            return False
        (result,) = group.train_many([request_from(*found)], ClientStore(Path()))
        send_tensors(connection, result_message(result), {} if isinstance(result, Failure) else result.tensors)
    return True
