"""The process beside a node that keeps its sharded clients' ranks between messages: see clients.shard_node.

In, on standard input: one line, what to be.  Then it answers parcels on its socket, one client after another.

It ends with what it was bound to, however that ends: the process that started it, which holds its standard input, or
another one that it is told (`node`).  It ends, too, when it is told that the run is over, or when nobody has asked for anything for a
while (`idle_s`): a server that was killed says no farewell, and the node may last for other runs.  Its ranks end with it.
"""

import logging
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from clients import parcels
from clients.shard_group import ShardGroup
from clients.state import ClientStore
from fedsign.config import from_toml
from fedsign.errors import EngineError
from fedsign.processes import Message
from fedsign.records import Failure, ObjectiveSpec, Tensors, TrainRequest
from fedsign.workload import Workload

_BACKLOG = 64
_log = logging.getLogger(__name__)


def main(given: Message) -> None:
    """Answer until there is nobody left to answer to; nothing if another one was quicker."""
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        try:
            server.bind(parcels.address_of(given["name"]))
        except OSError:
            return
        threading.Thread(target=_end_with, args=(given["node"],), daemon=True).start()
        server.listen(_BACKLOG)
        server.settimeout(given["idle_s"])
        sites = given["sites"]
        workload = Workload(from_toml(given["config"]), None if sites is None else frozenset(sites))
        with ShardGroup(workload, logs=Path(given["logs"])) as group:
            try:
                while _answer(server.accept()[0], group, server):
                    pass
            except TimeoutError:
                server.close()  # before the ranks end: whoever asks now starts another one
                group.part(is_over=False)


def _answer(connection: socket.socket, group: ShardGroup, server: socket.socket) -> bool:
    """One client; an asker that is gone meanwhile is not told.  False where there will be no other."""
    with connection:
        try:
            parcels.check_user(connection)
        except EngineError as error:
            _log.warning("%s", error)
            return True
        found = parcels.receive(connection)
        if found is None:
            return True
        if "end" in found[0]:
            server.close()  # before the asker is let go, which may be followed by another run
            group.part(is_over=True)  # and before this process ends with the asker
            return False
        (result,) = group.train_many([_request(*found)], ClientStore(Path()))
        with suppress(BrokenPipeError, ConnectionResetError):
            if isinstance(result, Failure):
                parcels.send(connection, {"failed": result.reason, "details": result.details}, {})
            else:
                said = {"num_examples": result.num_examples, "metrics": result.metrics}
                parcels.send(connection, said, result.tensors)
    return True


def _request(said: Message, tensors: Tensors) -> TrainRequest:
    return TrainRequest(
        round=said["round"],
        partition=said["partition"],
        tensors=tensors,
        objective=ObjectiveSpec(name=said["objective"], settings=said["settings"]),
        state_version=0,
        needed_versions=frozenset({0}),
    )


def _end_with(node: int | None) -> NoReturn:
    """Wait for the end of the node's process, or of who holds this one's input; ranks notice by themselves."""
    poll = select.poll()
    with suppress(ProcessLookupError):
        poll.register(0 if node is None else os.pidfd_open(node), 0 if node is None else select.POLLIN)
        poll.poll()
    os._exit(0)
