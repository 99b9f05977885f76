"""A machine of a silo that joins the first one, `fedsign worker`: it holds ranks of the clients that the first one trains.

It keeps the experiment's data loaded, and the ranks are its children, as on the first machine.  What is said over the link: clients.shard_machines.

The ranks end when the first machine says so, or when the link to it ends, however that comes.  Then the first machine is looked for again, since it
may be started anew, until it says that the run is over.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from clients.node import Node, as_played
from clients.shard_link import Link, ask_in
from clients.shard_ranks import INTERFACE, Death, Heard, LocalRanks, Meeting
from clients.shared_data import digest_of
from fedsign.addresses import Address, interface_of
from fedsign.config import from_toml
from fedsign.data import sites
from fedsign.errors import ConfigError, EngineError, FedSignError, JoinError
from fedsign.processes import Message, audible
from fedsign.records import failure_of
from fedsign.workload import Workload

_PAUSE_S = 0.5
_CONNECTING_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What `fedsign worker` was asked for."""

    address: Address
    secret: bytes
    interface: str  # empty: that of the connection
    data_root: str  # empty: as on the first machine
    logs: Path
    wait_s: float


def work(asked: Asked, say: Say) -> None:
    """Hold ranks until the run is over.

    Raises:
        JoinError: the first machine does not let this one in, or this one cannot take part.
        EngineError: the first machine is not to be found for `asked.wait_s` seconds.
    """
    check_interface(asked.interface)
    say(f"looking for the first machine at {asked.address}")
    with closing(_Ranks(asked, say)) as ranks:
        while not _served(_joined(asked, say), ranks):
            say(f"the connection to {asked.address} has ended; looking for it again")
    say("the run is over")


def check_interface(name: str) -> None:
    """Raise ConfigError unless this machine has it; an empty name is none."""
    known = [each for _, each in socket.if_nameindex()]
    if name and name not in known:
        raise ConfigError(f"--interface={name} was given, but this machine has {', '.join(known)}; name one of these.")


def _joined(asked: Asked, say: Say) -> Link:
    """A link to the first machine, which has let this one in.

    Raises:
        JoinError: it does not.
        EngineError: it is not to be found.
    """
    deadline = time.monotonic() + asked.wait_s
    while time.monotonic() < deadline:
        with suppress(OSError):
            where = (asked.address.resolved(), asked.address.port)
            link = Link(socket.create_connection(where, timeout=_CONNECTING_S))
            if ask_in(link, asked.secret):
                say(f"joined {asked.address}")
                return link
            link.close()
        time.sleep(_PAUSE_S)
    raise EngineError(
        f"no first machine of a client answered at {asked.address} for {asked.wait_s:g} s; start the run (or node) there with "
        f"client.sharding.listen (or its sharding-listen) set to {asked.address}, and let the firewall pass it, or raise --wait."
    )


def _served(link: Link, ranks: "_Ranks") -> bool:
    """Do what the first machine says; False where the link ends without a farewell."""
    with closing(link):
        told = link.receive()
        if told is None or "over" in told:
            return told is not None
        try:
            digest = ranks.load(told)
        except FedSignError as error:
            link.send({"failed": str(error)})
            raise
        link.send({"data": digest})
        try:
            return _obeyed(link, ranks)
        finally:
            ranks.end()


def _obeyed(link: Link, ranks: "_Ranks") -> bool:
    """Start, ask and end ranks; False where the link ends without a farewell.

    Raises:
        JoinError: the first machine has no use for this one.
    """
    while True:
        voice, *_ = audible([link, *ranks.local.voices()])
        if voice is not link:
            for heard in ranks.local.hear(voice):
                link.send(ranks.told(heard))
            continue
        said = link.receive(ranks.local.memory)
        if said is None or "over" in said:
            return said is not None
        if "refused" in said:
            raise JoinError(said["refused"])
        ranks.obey(said, link)


def _listed(ranks: range) -> str:
    """In words.

    >>> _listed(range(2, 3)), _listed(range(2, 4)), _listed(range(2, 6))
    ('the rank 2', 'the ranks 2 and 3', 'the ranks 2 to 5')
    """
    if len(ranks) == 1:
        return f"the rank {ranks.start}"
    return f"the ranks {ranks.start} {'and' if len(ranks) == 2 else 'to'} {ranks.stop - 1}"


def _workload(told: Message, data_root: str) -> Workload:
    """The experiment as the first machine plays it, with this machine's place of the data.

    Raises:
        ConfigError: sites of one process are read from a folder each.
    """
    config = from_toml(told["config"])
    if data_root and sites.has_sites(config) and not sites.lies_at_nodes(config):
        raise ConfigError(
            f"--data-root={data_root} was given, but all sites are trained in one process, and each has a folder of its own: let "
            "partition.roots be right on all machines, and leave --data-root out."
        )
    return as_played(config, Node(partitions=tuple(told["sites"] or ()), data_root=data_root))


class _Ranks:
    """The ranks of this machine, and the experiment that they are for."""

    def __init__(self, asked: Asked, say: Say) -> None:
        self._asked, self._say = asked, say
        self._told: Message | None = None
        self._local: LocalRanks | None = None
        self._digest, self._group = "", 0

    @property
    def local(self) -> LocalRanks:
        """Those of the experiment that is loaded."""
        if self._local is None:
            raise EngineError(
                "a first machine asked for ranks before it had said what to train; start the run there again."
            )
        return self._local

    def load(self, told: Message) -> str:
        """Load an experiment's data, unless they are; returns their digest.

        Raises:
            FedSignError: they cannot be read here.
        """
        if told != self._told:
            self.close()
            workload = _workload(told, self._asked.data_root)
            self._local, self._digest = LocalRanks(workload, logs=self._asked.logs), digest_of(workload.dataset)
            self._told = told
        return self._digest

    def obey(self, said: Message, link: Link) -> None:
        """Start the ranks, ask them, or end them."""
        if "start" in said:
            self._group = said["group"]
            ranks = range(*said["start"])
            self._say(f"holds {_listed(ranks)} of {self.local.num_ranks}")
            try:
                self.local.start(ranks, self._meeting(said["port"], link))
            except Exception as error:  # noqa: BLE001 - the client's failure, whatever it is
                failure = failure_of(0, error)
                link.send(self.told(Heard(ranks.start, {"failed": failure.reason, "details": failure.details})))
        elif "ask" in said:
            self.local.ask(said["ask"], self.local.memory)
        else:
            self.local.end()

    def told(self, heard: Heard) -> Message:
        """What the first machine is told of it."""
        rank, said = heard
        message = {"died": [said.who, said.how, said.remedy]} if isinstance(said, Death) else {"said": said}
        return {"group": self._group, "rank": rank, **message}

    def end(self) -> None:
        """End the ranks; the data stay."""
        if self._local:
            self._local.end()

    def close(self) -> None:
        """End the ranks, and give back the memory."""
        if self._local:
            self._local.close()
        self._local = self._told = None

    def _meeting(self, port: int, link: Link) -> Meeting:
        """Where the ranks meet: at the first machine.

        Raises:
            EngineError: it is not known by which interface.
        """
        interface = self._asked.interface or os.environ.get(INTERFACE) or interface_of(link.here)
        if not interface:
            raise EngineError(
                f"no network interface of the machine at {link.here} has this as its first address; give its worker --interface NAME."
            )
        return Meeting(host=link.there, port=port, interface=interface)
