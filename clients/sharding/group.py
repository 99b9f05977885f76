"""Train one client in `client.sharding.ranks` processes, each with a shard of the model states.

`ShardGroup` is a `LocalTrainer`.  It keeps the processes, with model and data loaded, across clients and rounds.  They
run on this machine (`ranks.py`), and optionally on others that have joined it (`machines.py`).  A client's tensors are
in memory shared by all processes of a machine ([Note: files without a name] in fedsign.transport.tensors); messages
carry the request and the metrics.  `training.py` divides the work.

If a rank dies, fails, or is late, or if a machine is lost, the client's round ends with a failure.  The other ranks are
then blocked in a collective that only their end can interrupt, so all ranks are ended, and the next client gets new
ones.  Ranks end with the process that started them (`fedsign.transport.process`).
"""

import time
from collections.abc import Collection, Iterable, Iterator
from math import inf
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from clients.sharding.machines import RemoteRanks, Rendezvous
from clients.sharding.payload import EXTRA, MODEL, SHARED, STATE, from_payload, to_payload
from clients.sharding.ranks import RENDEZVOUS_S, LocalRanks, RankMessage, opened_store
from clients.sharding.training import lost_metric, mean_loss
from clients.sharding.trial import OBJECTIVE
from clients.state.store import ClientStore
from clients.workers.messages import request_message
from clients.workers.shared_data import described, digest_of
from fedsign.compatibility import Experiment
from fedsign.errors import EngineError, FedSignError, LateError, RankError
from fedsign.records import LATE, Failure, TrainReply, TrainRequest, failure_of
from fedsign.rules import check
from fedsign.sharding.section import ShardingSection
from fedsign.transport.connection import Message, poll
from fedsign.transport.tensors import Layout
from fedsign.workload import Workload

_LAST_WORDS_S = 1.0  # a rank may complain about a lost one before the loss itself is reported


class _ToldError(FedSignError):
    """A failure reported by a rank, as the fields of a Failure."""


class ShardGroup:
    """Trains clients in sharded processes, which start with the first client; `close` ends them."""

    def __init__(self, workload: Workload, *, logs: Path) -> None:
        """Prepare a group; the processes of this machine log to files in `logs`.

        Raises:
            EngineError: this process is a rank itself.
        """
        self._workload, self._settings = workload, ShardingSection.of(workload.config)
        self._here = LocalRanks(workload, logs=logs)
        self.max_request_bytes = len(self._here.memory)  # of a client's tensors
        self._roles = workload.roles
        self._rendezvous: Rendezvous | None = None
        self._joined: list[RemoteRanks] = []
        self._store: TCPStore | None = None  # for the ranks' rendezvous

    def train_many(self, requests: Iterable[TrainRequest], states: ClientStore) -> Iterator[TrainReply | Failure]:
        """Train clients one by one; replies are in shared memory, which is reused once they are released."""
        for request in requests:
            result: TrainReply | Failure
            try:
                result = self._train(request, states)
            except Exception as error:  # noqa: BLE001 - a client's error is a reply, on every engine
                self._end()
                result = _failure(request.partition, error)
            yield result
            del result  # lets its memory be reused as soon as the caller releases it

    def close(self) -> None:
        """End the processes, and tell workers on other machines that the run is over."""
        self.part(is_over=True)
        self._here.close()

    def part(self, *, is_over: bool) -> None:
        """End the ranks and disconnect other machines, whose workers end only if the run is over."""
        self._end()
        if self._rendezvous:
            self._rendezvous.close(is_over=is_over)
            self._rendezvous = None

    def _train(self, request: TrainRequest, states: ClientStore) -> TrainReply:
        # a strategy may change the objective after the check before the run
        experiment = Experiment(workload=self._workload, spec=request.objective)
        check([OBJECTIVE], experiment)
        has_state = experiment.objective.has_state
        state = states.load(request) if has_state else None
        given = to_payload({MODEL: request.tensors, SHARED: request.shared, STATE: state or {}})
        deadline = time.monotonic() + self._workload.config.server.round_timeout_s
        if self._store is None:
            self._start(deadline)
        layout, memory = Layout.of(given), self._here.memory
        layout.write(given, memory)
        slot = self._here.replies.take()
        lent = self._here.replies.lent(slot)
        message = {**request_message(request), "layout": layout.as_json(), "slot": slot}
        for host in self._hosts:
            host.ask(message, memory[: layout.num_bytes])
        answers = self._answers(deadline)
        found = from_payload(Layout.from_json(answers[0]["layout"]).read(lent))
        if has_state:  # before the reply, as in one process
            states.save(request.partition, request.round, found[STATE])
        return TrainReply(
            round=request.round,
            partition=request.partition,
            tensors=found[MODEL],
            roles=self._roles,
            num_examples=len(self._workload.share_of(request.partition)),
            # summed by rank, in whatever order they answered
            metrics={
                "train-loss": mean_loss(answers[0]["nums"], [each["losses"] for each in answers]),
                **lost_metric([each["lost"] for each in answers]),
            },
            has_state=has_state,
            extra=found[EXTRA],
        )

    @property
    def _hosts(self) -> list[LocalRanks | RemoteRanks]:
        return [self._here, *self._joined]

    def _start(self, deadline: float) -> None:
        """Start all ranks, and wait until they have formed a process group.

        Raises:
            EngineError: machines are missing, or the ranks do not find each other.
        """
        num, ranks = self._settings.machines, self._settings.ranks
        if num > 1:
            self._joined = self._opened_rendezvous().take(num - 1, deadline=deadline, wait_s=self._settings.join_s)
        self._store, where = opened_store({each.connection.local_host for each in self._joined})
        for number, host in enumerate(self._hosts):
            # consecutive ranks: groups with fast links stay within a machine
            host.start(range(ranks * number // num, ranks * (number + 1) // num), where)
        try:
            self._answers(min(deadline, time.monotonic() + RENDEZVOUS_S))
        except LateError:
            if time.monotonic() > deadline:
                raise
            raise EngineError(
                f"the {ranks} processes that train a client together did not find each other within "
                f"{RENDEZVOUS_S:g} s; let all ports be open between the machines, and look at the logs of the ranks."
            ) from None

    def _opened_rendezvous(self) -> Rendezvous:
        """Open the rendezvous with the first client, so that a failure to listen is the client's failure."""
        if self._rendezvous is None:
            address, key = self._settings.where_machines_join()
            self._rendezvous = Rendezvous(
                address,
                key=key,
                num_ranks=self._settings.ranks,
                experiment=described(self._workload),
                digest=digest_of(self._workload.dataset),
            )
        return self._rendezvous

    def _answers(self, deadline: float) -> list[Message]:
        """The next message of each rank, by rank.

        Raises:
            RankError: a rank has died, or a machine is lost.
            LateError: a rank has not replied in time.
        """
        answers: dict[int, Message] = {}
        failures: dict[int, Message] = {}
        while len(answers) < self._settings.ranks and not any("died" in failure for failure in failures.values()):
            messages = self._messages(deadline)
            if not messages and failures:
                break
            if messages is None:
                raise LateError(LATE)
            for rank, message in messages:
                # Wait a little longer: the root cause, a death, may arrive after another rank's complaint.
                if "died" in message or "failed" in message:
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
                    failures[rank] = message
                else:
                    answers[rank] = message
        if failures:
            raise _first_cause(failures.values())
        return [answers[rank] for rank in range(self._settings.ranks)]

    def _messages(self, deadline: float) -> list[RankMessage] | None:
        """The next messages of any ranks; None at the deadline."""
        host_of = {connection: host for host in self._hosts for connection in host.connections()}
        readable = poll(host_of, None if deadline == inf else max(0.0, deadline - time.monotonic()))
        return [message for each in readable for message in host_of[each].drain(each)] if readable else None

    def _end(self) -> None:
        """End the ranks at once; joined machines wait for the next group."""
        for host in self._hosts:
            host.end()
        if self._rendezvous:
            self._rendezvous.give_back(self._joined)
        self._joined, self._store = [], None


def _first_cause(failures: Collection[Message]) -> FedSignError:
    """The root cause among failures: a process that died, before complaints about it."""
    for failure in failures:
        if "died" in failure:
            who, how, remedy = failure["died"]
            return RankError(f"{who} {how}; the others were ended, and the next client gets new ones. {remedy}.")
    return _ToldError(next(iter(failures))["failed"])


def _failure(partition: int, error: Exception) -> Failure:
    if isinstance(error, _ToldError):
        return Failure(**error.args[0] | {"partition": partition})
    return Failure(partition=partition, reason=LATE) if isinstance(error, LateError) else failure_of(partition, error)
