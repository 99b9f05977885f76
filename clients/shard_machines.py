"""Machines that join the first one of a silo, to hold ranks of its clients (`client.sharding.machines`), as the first one sees them.

Each runs `fedsign worker` (clients.shard_worker), which connects.  The first machine lets it in, says what is trained, and compares the data;
then the machine waits until a group of ranks takes it, and again when the group has ended.  More machines than a group takes wait in reserve.

What goes over the link ([Note: an end that is gone] in clients.shard_link), after both are sure of each other:

To the worker:    {"config": toml, "sites": [...] or null} once, and after its answer
                  {"start": [first rank, last + 1], "group": n, "port": n}   n counts the groups of this machine; ranks meet at this port
                  {"ask": request} and the client's tensors                  the request is what clients.shard_process takes
                  {"end": true}                                              the group, at once
                  {"over": true}                                             the run; so the worker ends
To the first:     {"data": digest} or {"failed": sentence} once
                  {"group": n, "rank": n, "said": message} or, in place of `said`, "died": [who, how, remedy]
"""

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from clients.shard_link import Link, let_in
from clients.shard_ranks import Death, Heard, Meeting
from fedsign.addresses import Address
from fedsign.errors import EngineError, JoinError
from fedsign.processes import Audible, Message, audible

_BACKLOG = 64
_PATIENCE_S = 10.0  # for the port, which the run before may still hold
_LOOKS_EVERY_S = 0.2
_QUIET_S = 5.0  # for which a client waits without a word
_log = logging.getLogger("fedsign")


class JoinedRanks:
    """A Machine: one that has joined."""

    def __init__(self, link: Link, *, again: str) -> None:
        """`again` is the command that joins."""
        self.link, self._again = link, again
        self._name = ""
        self._ranks, self._num_ranks, self._group = range(0), 0, 0

    def place(self, number: int, *, machines: int, ranks: int) -> None:
        """Which machine of a group it is, for those who read of it; the group has so many ranks."""
        self._name, self._num_ranks = f"machine {number + 1} of {machines} ({self.link.there})", ranks

    def still_waits(self) -> bool:
        """Whether it is there, for all that can be heard by now; what ranks of a former group have said is not heard."""
        while audible([self.link], 0.0):
            if self.link.receive() is None:
                return False
        return True

    def start(self, ranks: range, meeting: Meeting) -> None:
        """See Machine; to it, the ranks meet where it has joined."""
        self._ranks, self._group = ranks, self._group + 1
        self.link.send({"start": [ranks.start, ranks.stop], "group": self._group, "port": meeting.port})

    def ask(self, request: Message, tensors: Tensor) -> None:
        """See Machine; the tensors go to it once, however many ranks it has."""
        self.link.send({"ask": request}, tensors)

    def voices(self) -> Sequence[Audible]:
        """See Machine."""
        return [self.link]

    def hear(self, voice: Audible) -> list[Heard]:
        """See Machine; what ranks of a former group have said is not heard."""
        found = self.link.receive()
        if found is None:
            return [Heard(self._ranks.start, self._lost())]
        if found["group"] != self._group:
            return []
        return [Heard(found["rank"], self._died(*found["died"]) if "died" in found else found["said"])]

    def end(self) -> None:
        """See Machine."""
        self.link.send({"end": True})

    def _died(self, who: str, how: str, remedy: str) -> Death:
        return Death(f"{who}, on {self._name},", how, f"{remedy} there")

    def _lost(self) -> Death:
        ranks = f"{self._ranks.start} to {self._ranks.stop - 1}" if len(self._ranks) > 1 else f"{self._ranks.start}"
        return Death(
            f"{self._name}, which holds rank {ranks} of the {self._num_ranks} processes that train this client together,",
            "is lost: its worker has ended, or the network to it is broken",
            f"Start '{self._again}' there again, or on another machine",
        )


class Lobby:
    """Where machines join; a thread lets them in as they come."""

    def __init__(self, address: Address, *, secret: bytes, told: Message, digest: str) -> None:
        """`told` is what a machine gets to know of the experiment, `digest` that of the data it has to have.

        Raises:
            EngineError: nobody can listen there.
        """
        self._address, self._secret, self._told, self._digest = address, secret, told, digest
        self._again = f"fedsign worker --join {address}" + (" --secret-file FILE" if secret else "")
        self._server = _listening(address)
        self._changed = threading.Condition()
        self._arriving: set[Link] = set()
        self._waiting: list[JoinedRanks] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def take(self, num: int, *, deadline: float, wait_s: float) -> list[JoinedRanks]:
        """So many machines, for a group; they wait no more until they are brought back.

        Raises:
            EngineError: there are not so many in time.
        """
        now = time.monotonic()
        until = min(deadline, now + wait_s)
        with self._changed:
            if not self._come(num, min(until, now + _QUIET_S)):
                _log.warning("a client waits for machines: start '%s' on those that are missing", self._again)
                if not self._come(num, until):
                    raise EngineError(self._missing(num, wait_s))
            taken, self._waiting = self._waiting[:num], self._waiting[num:]
        return taken

    def bring_back(self, machines: Sequence[JoinedRanks]) -> None:
        """They wait again, before the others; those that are gone are found out when they are taken."""
        with self._changed:
            self._waiting = [*machines, *self._waiting]

    def close(self, *, is_over: bool) -> None:
        """Let nobody join any more; to those that wait the run is over, or else they look for whoever comes next."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # so that the thread hears it
        self._server.close()
        with self._changed:
            links = [*(machine.link for machine in self._waiting), *self._arriving]
            self._waiting, self._arriving = [], set()
        for link in links:
            link.say_farewell({"over": True}) if is_over else link.close()

    def _come(self, num: int, until: float) -> bool:
        """Wait until so many machines wait; those that are gone are forgotten."""
        while True:
            gone = [machine for machine in self._waiting if not machine.still_waits()]
            for machine in gone:
                machine.link.close()
            self._waiting = [machine for machine in self._waiting if machine not in gone]
            left_s = until - time.monotonic()
            if len(self._waiting) >= num or left_s <= 0:
                return len(self._waiting) >= num
            self._changed.wait(left_s)

    def _missing(self, num: int, wait_s: float) -> str:
        loading = len(self._arriving)
        at_work = f", and {loading} more {'is' if loading == 1 else 'are'} loading the data" if loading else ""
        return (
            f"{len(self._waiting) + 1} of the {num + 1} machines that train a client together were there, this one included{at_work}, when "
            f"client.sharding.join_s={wait_s:g} had passed; start '{self._again}' on each that is missing, or raise it."
        )

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return  # closed
                time.sleep(_LOOKS_EVERY_S)  # about to be, or the system has no more descriptors at the moment
                continue
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        """Let a machine in, and let it wait; one that is refused is told why, and so are those who read the log."""
        try:
            link = Link(connection)
        except OSError:
            connection.close()  # it is gone already
            return
        with self._changed:
            self._arriving.add(link)
        why_not = self._refusal(link)
        with self._changed:
            is_open = link in self._arriving  # nobody has closed the lobby meanwhile
            self._arriving.discard(link)
            if is_open and not why_not:
                self._waiting.append(JoinedRanks(link, again=self._again))
                self._changed.notify_all()
        if is_open and why_not:
            link.close()
            _log.warning("a machine at %s was not let in: %s", link.there, why_not)

    def _refusal(self, link: Link) -> str:
        """Empty if it can take part."""
        try:
            self._admit(link)
        except JoinError as error:
            return str(error)
        return ""

    def _admit(self, link: Link) -> None:
        """Raises: JoinError: it is none that could take part."""
        let_in(link, self._secret)
        link.send(self._told)
        answer = link.receive()
        if answer is None:
            raise JoinError("it was gone before it had loaded the data.")
        if "failed" in answer:
            raise JoinError(f"it cannot take part: {answer['failed']}")
        if answer["data"] != self._digest:
            why_not = "the training samples there are others than on the first machine; let both read the same data (--data-root says where)."
            link.send({"refused": why_not})
            raise JoinError(why_not)


def _listening(address: Address) -> socket.socket:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_server((address.resolved(), address.port), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise EngineError(
                    f"nobody can listen on {address} here ({os.strerror(error.errno or 0)}); give client.sharding.listen, or the "
                    "node's sharding-listen, an address of this machine and a port that is free."
                ) from error
        time.sleep(_LOOKS_EVERY_S)
