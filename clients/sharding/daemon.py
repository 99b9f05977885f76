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
from clients.sharding.payload import EXTRA, MODEL, SHARED, STATE, from_payload, to_payload
from clients.workers.messages import GivenStates, request_from, result_message
from clients.workers.shared_data import workload_from
from fedsign.errors import EngineError
from fedsign.records import Tensors, TrainReply
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
        given, states = from_payload(received[1]), GivenStates()
        request = request_from(received[0], given[MODEL], given[SHARED])
        if STATE in given:
            states.given[request.partition] = given[STATE]
        (result,) = group.train_many([request], states)
        reply = Tensors()
        if isinstance(result, TrainReply):
            _, state = states.saved.get(request.partition, (0, {}))
            reply = to_payload({MODEL: result.tensors, EXTRA: result.extra, STATE: state})
        send_tensors(connection, result_message(result), reply)
    return True
