"""Processes that train one client together, each with its share of the model's states: `client.sharding.ranks` of them.

`ShardGroup` is one more `LocalTrainer`.  It keeps the processes, with model and data loaded, from client to client and from round to round.
They are on this machine, or on this and others that have joined it: `clients.shard_ranks`, `clients.shard_machines`.
What a client brings and what comes of it lie in memory that all of a machine see ([Note: files without a name] in
fedsign.transport.tensors); over the pipes go the request and the figures.  How the work is divided: `clients.shard_training`.

A rank that dies, fails or is late ends the round of its client, with a failure that says so, and so does the loss of a machine.  The others wait
for it within a collective, which nothing but their end interrupts: so all are ended, and the next client gets new ones.  Ranks end with
the process that started them, however it ends (`fedsign.processes`).
"""

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Self

from clients.shard_machines import JoinedRanks, Lobby
from clients.shard_ranks import INTERFACE, MEETING_S, Death, Heard, LocalRanks, Machine, Meeting, meeting_here
from clients.shard_rules import refused_objective, where_machines_join
from clients.shard_training import mean_loss
from clients.shared_data import digest_of
from clients.state import ClientStore
from fedsign.addresses import interface_of
from fedsign.errors import ConfigError, EngineError, FedSignError, LateError, RankError
from fedsign.processes import Message, audible
from fedsign.records import LATE, Failure, TrainReply, TrainRequest, failure_of
from fedsign.transport.tensors import Layout
from fedsign.workload import Workload

_LAST_WORDS_S = 1.0  # a rank that has lost another one complains, perhaps before that one is known to be gone


class _ToldError(FedSignError):
    """What a rank says of its own failure; the second argument is its traceback."""


class ShardGroup:
    """See the module; a context manager, which ends the processes.  They start with the first client, and machines join from then on."""

    def __init__(self, workload: Workload, *, logs: Path) -> None:
        """What the processes of this machine have to say goes to files in `logs`.

        Raises:
            EngineError: this process is a rank itself.
        """
        self._workload, self._settings = workload, workload.config.client.sharding
        self._here = LocalRanks(workload, logs=logs)
        self._roles = workload.roles
        self._lobby: Lobby | None = None
        self._joined: list[JoinedRanks] = []
        self._is_there = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def processes(self) -> list[int]:
        """The ids of those on this machine."""
        return self._here.processes

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[TrainReply | Failure]:
        """See LocalTrainer; a reply's tensors lie in shared memory, which is used again when they are gone."""
        for request in requests:
            try:
                yield self._train(request)
            except LateError:
                self._end()
                yield Failure(partition=request.partition, reason=LATE)
            except _ToldError as error:
                self._end()
                yield Failure(partition=request.partition, reason=str(error.args[0]), details=str(error.args[1]))
            except Exception as error:  # noqa: BLE001 - a client's error is an answer, on every engine
                self._end()
                yield failure_of(request.partition, error)

    def close(self) -> None:
        """End the processes; for the workers of other machines the run is over, unless they were parted with."""
        self.part(is_over=True)
        self._here.close()

    def part(self, *, is_over: bool) -> None:
        """End the ranks, and part with the workers of other machines: they end if the run is over, or look for who comes after this."""
        self._end()
        if self._lobby:
            self._lobby.close(is_over=is_over)
            self._lobby = None

    def _train(self, request: TrainRequest) -> TrainReply:
        why_not = refused_objective(request.objective)
        if why_not:
            raise ConfigError(f"client.sharding.ranks={self._settings.ranks} was given, but {why_not}.")
        deadline = time.monotonic() + self._workload.config.server.round_timeout_s
        if not self._is_there:
            self._start(deadline)
        came, memory = Layout.of(request.tensors), self._here.memory
        came.write(request.tensors, memory)
        slot = self._here.replies.take()
        lent = self._here.replies.lent(slot)
        asked = {"train": request.partition, "round": request.round, "layout": came.as_json(), "slot": slot}
        objective = {"name": request.objective.name, "settings": dict(request.objective.settings)}
        for machine in self._machines:
            machine.ask({**asked, "objective": objective}, memory[: came.num_bytes])
        said = self._answers(deadline)
        trained = [each["trained"] for each in said]
        return TrainReply(
            round=request.round,
            partition=request.partition,
            tensors=Layout.from_json(said[0]["layout"]).read(lent),
            roles=self._roles,
            num_examples=len(self._workload.share_of(request.partition)),
            metrics={"train-loss": mean_loss(trained[0]["nums"], [each["losses"] for each in trained])},
            has_state=False,
            extra={},
        )

    @property
    def _machines(self) -> Sequence[Machine]:
        return [self._here, *self._joined]

    def _start(self, deadline: float) -> None:
        """Start all ranks, and wait until they have met.

        Raises:
            EngineError: machines are missing, or ranks do not find each other.
        """
        num, ranks = self._settings.machines, self._settings.ranks
        if num > 1:
            self._joined = self._opened_lobby().take(num - 1, deadline=deadline, wait_s=self._settings.join_s)
            for number, joined in enumerate(self._joined, start=1):
                joined.place(number, machines=num, ranks=ranks)
        meeting = _meeting_with(self._joined) if self._joined else meeting_here()
        self._is_there = True
        try:
            for number, machine in enumerate(self._machines):
                machine.start(range(ranks * number // num, ranks * (number + 1) // num), meeting)
        finally:
            if meeting.place:
                meeting.place.close()  # rank 0 has it
        try:
            self._answers(min(deadline, time.monotonic() + MEETING_S))
        except LateError:
            if time.monotonic() > deadline:
                raise
            raise EngineError(
                f"the {ranks} processes that train a client together did not find each other within {MEETING_S:g} s; let all ports be "
                "open between the machines, and look at the logs of the ranks."
            ) from None

    def _opened_lobby(self) -> Lobby:
        """Where machines join, from the first client on: so it is the client's failure if nobody can listen there."""
        if self._lobby is None:
            address, secret = where_machines_join(self._settings)
            sites = self._workload.sites_here
            self._lobby = Lobby(
                address,
                secret=secret,
                told={"config": self._workload.config.to_toml(), "sites": None if sites is None else sorted(sites)},
                digest=digest_of(self._workload.dataset),
            )
        return self._lobby

    def _answers(self, deadline: float) -> list[Message]:
        """What each rank says next, in their order.

        Raises:
            RankError: one has died, or a machine is lost.
            LateError: not all have answered in time.
        """
        found: dict[int, Message] = {}
        troubles: dict[int, Message | Death] = {}
        while len(found) < self._settings.ranks:
            heard = self._heard(deadline)
            if not heard and troubles:
                break
            if heard is None:
                raise LateError(LATE)
            for rank, said in heard:
                if isinstance(said, Death) or "failed" in said:
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
                    troubles[rank] = said
                else:
                    found[rank] = said
            if any(isinstance(said, Death) for said in troubles.values()):
                break
        if troubles:
            raise _trouble(troubles)
        return [found[rank] for rank in range(self._settings.ranks)]

    def _heard(self, deadline: float) -> list[Heard] | None:
        """What some ranks say next, of any machine; None if nobody has said anything in time."""
        machine_of = {voice: machine for machine in self._machines for voice in machine.voices()}
        readable = audible(machine_of, None if deadline == inf else max(0.0, deadline - time.monotonic()))
        return [heard for voice in readable for heard in machine_of[voice].hear(voice)] if readable else None

    def _end(self) -> None:
        """End the ranks at once; machines that have joined wait for the next group."""
        for machine in self._machines:
            machine.end()
        if self._lobby:
            self._lobby.bring_back(self._joined)
        self._joined, self._is_there = [], False


def _meeting_with(joined: Sequence[JoinedRanks]) -> Meeting:
    """Of ranks on several machines: at the address by which the others have joined.

    Raises:
        EngineError: they have joined by addresses of which one is not for all, or none is an interface's.
    """
    hosts = {machine.link.here for machine in joined}
    if len(hosts) > 1:
        raise EngineError(
            f"machines have joined this one by different addresses, {' and '.join(sorted(hosts))}; start all workers with the same "
            "--join, which all can reach."
        )
    (host,) = hosts
    interface = os.environ.get(INTERFACE) or interface_of(host)
    if not interface:
        raise EngineError(
            f"machines have joined this one by {host}, which no network interface here has as its first address; name the interface in "
            f"the environment variable {INTERFACE}."
        )
    place = socket.create_server((host, 0))
    return Meeting(host=host, port=place.getsockname()[1], interface=interface, place=place)


def _trouble(troubles: dict[int, Message | Death]) -> FedSignError:
    """Of what is wrong, what it began with: a death before complaints about it."""
    for said in troubles.values():
        if isinstance(said, Death):
            return RankError(
                f"{said.who} {said.how}; the others were ended, and the next client gets new ones. {said.remedy}."
            )
    first = next(said for said in troubles.values() if not isinstance(said, Death))
    return _ToldError(first["failed"], first["details"])
