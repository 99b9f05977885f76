"""Processes that train one client together, each with its share of the model's states: `client.sharding.ranks` of them.

`ShardGroup` is one more `LocalTrainer`.  It keeps the processes, with model and data loaded, from client to client and from round to round.
What a client brings and what comes of it lie in memory that all see ([Note: files without a name] in
clients.shared_tensors); over the pipes go the request and the figures.  How the work is divided: `clients.shard_training`.

A rank that dies, fails or is late ends the round of its client, with a failure that says so.  The others wait for it within a
collective, which nothing but their end interrupts: so all are ended, and the next client gets new ones.  Ranks end with
the process that started them, however it ends (`fedsign.processes`).
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Self

from clients.shard_process import meeting_place
from clients.shard_rules import refused_objective
from clients.shard_training import mean_loss
from clients.shared_data import share_data
from clients.shared_tensors import Layout, Slots, slot_bytes_of
from clients.state import ClientStore
from fedsign.errors import ConfigError, EngineError, FedSignError, LateError, RankError
from fedsign.processes import Child, Message, audible
from fedsign.records import LATE, Failure, TrainReply, TrainRequest, failure_of
from fedsign.workload import Workload

RANK_MARK = "FEDSIGN_RANK"  # an environment variable: this process is one
_MODULE = "clients.shard_process"
_LAST_WORDS_S = 1.0  # a rank that has lost another one complains, perhaps before that one is known to be gone


class _ToldError(FedSignError):
    """What a rank says of its own failure; the second argument is its traceback."""


class ShardGroup:
    """See the module; a context manager, which ends the processes.  They start with the first client."""

    def __init__(self, workload: Workload, *, logs: Path) -> None:
        """What the processes have to say goes to files in `logs`.

        Raises:
            EngineError: this process is a rank itself.
        """
        if os.environ.get(RANK_MARK):
            raise EngineError(
                "a process that trains a share of a client was made to play a run, by a module that plays one when it is imported; "
                'put that under `if __name__ == "__main__":`.'
            )
        model = workload.make_model().state_dict()
        self._workload, self._logs = workload, logs
        self._roles = workload.roles
        self._models = Slots("models", slot_bytes_of(model))
        self._memory = self._models.memory(self._models.take())
        self._replies = Slots("replies", slot_bytes_of(model))
        self._data = share_data(workload)
        self._ranks: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def processes(self) -> list[int]:
        """Their ids."""
        return [child.pid for child in self._ranks]

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
        """End the processes; logs in which nothing stands are removed."""
        self._end()
        for file in (self._models, self._replies, *([self._data.file] if self._data else [])):
            file.close()
        for log in self._logs.glob("rank-*.log"):
            if not log.stat().st_size:
                log.unlink()
        with suppress(OSError):  # some have said something, or nobody was started
            self._logs.rmdir()

    def _train(self, request: TrainRequest) -> TrainReply:
        why_not = refused_objective(request.objective)
        if why_not:
            raise ConfigError(f"client.sharding.ranks={self._num_ranks} was given, but {why_not}.")
        deadline = time.monotonic() + self._workload.config.server.round_timeout_s
        if not self._ranks:
            self._start()
            self._answers(deadline)
        came = Layout.of(request.tensors)
        came.write(request.tensors, self._memory)
        slot = self._replies.take()
        memory = self._replies.lent(slot)
        asked = {"train": request.partition, "round": request.round, "layout": came.as_json(), "slot": slot}
        objective = {"name": request.objective.name, "settings": dict(request.objective.settings)}
        for child in self._ranks:
            child.say({**asked, "objective": objective})
        said = self._answers(deadline)
        trained = [each["trained"] for each in said]
        return TrainReply(
            round=request.round,
            partition=request.partition,
            tensors=Layout.from_json(said[0]["layout"]).read(memory),
            roles=self._roles,
            num_examples=len(self._workload.share_of(request.partition)),
            metrics={"train-loss": mean_loss(trained[0]["nums"], [each["losses"] for each in trained])},
            has_state=False,
            extra={},
        )

    @property
    def _num_ranks(self) -> int:
        return self._workload.config.client.sharding.ranks

    def _start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        files = [self._models, self._replies]
        shared = [file.descriptor for file in files] + ([self._data.file.descriptor] if self._data else [])
        config, sites = self._workload.config, self._workload.sites_here
        with meeting_place() as place:
            for rank in range(self._num_ranks):
                own = [place.fileno()] if rank == 0 else []
                child = Child(
                    _MODULE,
                    log=self._logs / f"rank-{rank}.log",
                    shared=[*shared, *own],
                    environment=_environment(),
                )
                self._ranks.append(child)
                child.say(
                    {
                        "rank": rank,
                        "config": config.to_toml(),
                        "sites": None if sites is None else sorted(sites),
                        "models": [self._models.descriptor, self._models.slot_bytes],
                        "replies": [self._replies.descriptor, self._replies.slot_bytes],
                        "data": None if self._data is None else self._data.as_json(),
                        "meeting": [place.getsockname()[1], place.fileno()],
                    }
                )

    def _answers(self, deadline: float) -> list[Message]:
        """What each rank says next, in their order.

        Raises:
            RankError: one has died.
            LateError: not all have answered in time.
        """
        found: dict[int, Message] = {}
        troubles: dict[int, Message | None] = {}
        while len(found) < len(self._ranks):
            left_s = deadline - time.monotonic()
            heard = audible([child for child in self._ranks if self._ranks.index(child) not in troubles], _wait(left_s))
            if not heard and troubles:
                break
            if not heard:
                raise LateError(LATE)
            for child in heard:
                rank = self._ranks.index(child)
                for message in child.hear():
                    if message is None or "failed" in message:
                        deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
                        troubles[rank] = message
                    else:
                        found[rank] = message
            if None in troubles.values():
                break
        if troubles:
            raise self._trouble(troubles)
        return [found[rank] for rank in range(len(self._ranks))]

    def _trouble(self, troubles: dict[int, Message | None]) -> FedSignError:
        """Of what is wrong, what it began with: a death before complaints about it."""
        dead = [rank for rank, message in troubles.items() if message is None]
        if dead:
            child = self._ranks[dead[0]]
            return RankError(
                f"rank {dead[0]} of the {len(self._ranks)} processes that train this client together {child.epitaph()}; the others "
                f"were ended, and the next client gets new ones. What it had to say is in {child.log}."
            )
        first = next(message for message in troubles.values() if message is not None)
        return _ToldError(first["failed"], first["details"])

    def _end(self) -> None:
        """End the ranks at once: they keep nothing that is not lost with a client's round."""
        for child in self._ranks:
            child.kill()
        for child in self._ranks:
            child.end()
        self._ranks = []


def _wait(left_s: float) -> float | None:
    return None if left_s == inf else max(0.0, left_s)


def _environment() -> dict[str, str]:
    return {RANK_MARK: "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
