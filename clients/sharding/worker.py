"""`fedsign worker`: a machine that joins the first machine of a silo and holds ranks of its clients.

It keeps the experiment's data loaded, and the ranks are its children, as on the first machine.  machines.py lists the
messages.

The ranks end when the first machine says so, or when the connection to it is lost.  The worker then keeps looking for
the first machine, which may be restarted, until it learns that the run is over.
"""

import socket
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from clients.sharding.machines import FACTS
from clients.sharding.ranks import LocalRanks, RankMessage, StoreAddress, interface_at
from clients.workers.messages import result_message
from clients.workers.shared_data import digest_of
from fedsign.config import from_toml
from fedsign.data.client_data import at_root
from fedsign.errors import ConfigError, EngineError, FedSignError, JoinError
from fedsign.records import failure_of
from fedsign.transport import handshake, tls
from fedsign.transport.addresses import Address
from fedsign.transport.connection import Connection, Message, poll
from fedsign.workload import Workload

_PAUSE_S = 0.5
_CONNECTING_S = 10.0

_say = partial(print, flush=True)


def check_interface(name: str) -> None:
    """Raise ConfigError unless this machine has the interface; an empty name passes."""
    known = [each for _, each in socket.if_nameindex()]
    if name and name not in known:
        raise ConfigError(f"--interface={name} was given, but this machine has {', '.join(known)}; name one of these.")


def _listed(ranks: range) -> str:
    """A range of ranks in words.

    >>> _listed(range(2, 3)), _listed(range(2, 4)), _listed(range(2, 6))
    ('the rank 2', 'the ranks 2 and 3', 'the ranks 2 to 5')
    """
    if len(ranks) == 1:
        return f"the rank {ranks.start}"
    return f"the ranks {ranks.start} {'and' if len(ranks) == 2 else 'to'} {ranks.stop - 1}"


def _workload(experiment: Message, data_root: str) -> Workload:
    """The first machine's experiment, with this machine's data folder."""
    config, here = from_toml(experiment["config"]), experiment["sites"]
    if data_root:
        config = at_root(config, data_root, here)
    return Workload(config, None if here is None else frozenset(here))


class Worker:
    """The ranks of this machine, and their experiment."""

    def __init__(
        self, address: Address, key: bytes, *, interface: str, data_root: str, logs: Path, wait_s: float
    ) -> None:
        """By default, `interface` is that of the connection, and `data_root` is the first machine's.

        Raises:
            ConfigError: this machine has no such interface.
        """
        check_interface(interface)
        self._address, self._key, self._wait_s = address, key, wait_s
        self._interface, self._data_root, self._logs = interface, data_root, logs
        self._experiment: Message | None = None
        self._ranks: LocalRanks
        self._digest, self._group = "", 0

    def work(self) -> None:
        """Hold ranks until the run is over.

        Raises:
            JoinError: the first machine refuses this one, or this one cannot take part.
            EngineError: the first machine was not found within `wait_s` seconds.
        """
        _say(f"looking for the first machine at {self._address}")
        with closing(self):
            while not self._serve(self._connected()):
                _say(f"the connection to {self._address} has ended; looking for it again")
        _say("the run is over")

    def _connected(self) -> Connection:
        """An authenticated connection to the first machine."""
        deadline = time.monotonic() + self._wait_s
        while time.monotonic() < deadline:
            with suppress(OSError):
                where = (self._address.resolved(), self._address.port)
                connection = Connection(socket.create_connection(where, timeout=_CONNECTING_S))
                is_secure = tls.secure(connection, is_listening=False)
                if is_secure and handshake.connect(connection, self._key, facts=FACTS):
                    _say(f"joined {self._address}")
                    return connection
                connection.close()
            time.sleep(_PAUSE_S)
        raise EngineError(
            f"no first machine of a client answered at {self._address} for {self._wait_s:g} s; "
            "start the run (or node) there with client.sharding.listen (or its sharding-listen) set to "
            f"{self._address}, and let the firewall pass it, or raise --wait."
        )

    def _serve(self, first: Connection) -> bool:
        """Serve the first machine; False if the connection is lost before the run is over."""
        with closing(first):
            experiment = first.receive()
            if experiment is None or "over" in experiment:
                return experiment is not None
            try:
                self._load(experiment)
            except FedSignError as error:
                first.send({"failed": str(error)})
                raise
            first.send({"data": self._digest})
            try:
                return self._relay(first)
            finally:
                self._ranks.end()

    def close(self) -> None:
        """End the ranks and free the memory."""
        if self._experiment is not None:
            self._ranks.close()
        self._experiment = None

    def _load(self, experiment: Message) -> None:
        """Load an experiment's data, unless already loaded.

        Raises:
            FedSignError: the data cannot be read here.
        """
        if experiment != self._experiment:
            self.close()
            workload = _workload(experiment, self._data_root)
            self._ranks, self._digest = LocalRanks(workload, logs=self._logs), digest_of(workload.dataset)
            self._experiment = experiment

    def _relay(self, first: Connection) -> bool:
        """Relay requests to the ranks and their messages back; False if the connection is lost before the run is over.

        Raises:
            JoinError: the first machine refuses this one.
        """
        while True:
            # one at a time: handling it may start or end ranks
            readable, *_ = poll([first, *self._ranks.connections()])
            if readable is not first:
                self._send(first, self._ranks.drain(readable))
                continue
            request = first.receive(self._ranks.memory.numpy().data)  # tensors land in the memory that the ranks share
            if request is None or "over" in request:
                return request is not None
            if "refused" in request:
                raise JoinError(request["refused"])
            if "start" in request:
                self._start(request, first)
            elif "ask" in request:
                self._ranks.ask(request["ask"], self._ranks.memory)
            else:
                self._ranks.end()

    def _start(self, request: Message, first: Connection) -> None:
        """Start ranks, which meet at the first machine's store."""
        self._group, ranks = request["group"], range(*request["start"])
        _say(f"holds {_listed(ranks)} of {self._ranks.num_ranks}")
        try:
            interface = self._interface or interface_at(first.local_host)
            if not interface:
                raise EngineError(
                    f"no network interface of the machine at {first.local_host} has this as its first address; "
                    "give its worker --interface NAME."
                )
            self._ranks.start(ranks, StoreAddress(host=first.peer_host, port=request["port"], interface=interface))
        except Exception as error:  # noqa: BLE001 - any error is the client's failure
            self._send(first, [RankMessage(ranks.start, result_message(failure_of(0, error)))])

    def _send(self, first: Connection, messages: Sequence[RankMessage]) -> None:
        for rank, message in messages:
            first.send({"group": self._group, "rank": rank, "message": message})
