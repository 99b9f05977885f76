"""In process: clients one after another or in stacks, nothing serialised.  The fast default, and the reference."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated

from pydantic import Field

from clients.app import in_process_handler
from clients.cohort.paths import trainer_of
from clients.conduct import conducted
from clients.sharding.group import ShardGroup
from clients.state.cache import StateCache
from clients.trainer import LocalTrainer
from clients.workers.pool import Workers, devices_of
from fedsign.exchange import DirectExchange
from fedsign.flower.in_process import InProcessGrid
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.results import RunFolder
from fedsign.workload import Workload
from simulations.backends.base import intra_op_threads
from simulations.rounds import OnRound, RoundLoop

_log = logging.getLogger("fedsign")


class InProcess:
    """Settings: `workers`, processes that train the clients of a round; with 1, this process does."""

    def __init__(self, *, workers: Annotated[int, Field(ge=1, le=1024)] = 1) -> None:
        self.workers = workers

    def check(self, workload: Workload) -> None:
        """See Engine."""
        devices_of(workload, self.workers)

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """See Engine."""
        config = workload.config
        cache = StateCache(folder.clients, budget_bytes=int(config.client.state_cache_mib * 2**20))
        threads, trainer_made = intra_op_threads(config.engine.threads), self._trainer_of(workload, folder)
        with threads, trainer_made as trainer, cache.closed_at_the_end() as states:
            num_partitions, roles = config.partition.num_clients, workload.roles
            grid = PartitionGrid(
                InProcessGrid(num_partitions, in_process_handler(trainer, states)),
                num_partitions=num_partitions,
                roles=roles,
            )
            direct = DirectExchange(
                partial(trainer.train_many, states=states), num_partitions=num_partitions, roles=roles
            )
            RoundLoop(
                workload,
                grid,
                folder,
                on_round,
                direct=direct,
                keep_states=states.commit,
                evaluation_threads=self.workers,  # who have nothing to do meanwhile
            ).run()

    @contextmanager
    def _trainer_of(self, workload: Workload, folder: RunFolder) -> Iterator[LocalTrainer]:
        """That of the path, in this process or in workers; a sharded client's are processes of its own."""
        if workload.config.get("client.sharding.ranks", 1) > 1:
            with ShardGroup(workload, logs=folder.path / "logs") as group:
                yield conducted(group, workload, in_process=True, folder=folder.clients)
        elif self.workers == 1:
            yield conducted(trainer_of(workload), workload, in_process=True, folder=folder.clients)
        else:
            self._warn_of_idle_workers(workload)
            devices = devices_of(workload, self.workers)
            with Workers(workload, devices=devices, logs=folder.path / "logs") as workers:
                yield conducted(workers, workload, in_process=True, folder=folder.clients)

    def _warn_of_idle_workers(self, workload: Workload) -> None:
        """A stack is one worker's work, and how many clients it holds must not depend on the number of workers."""
        chunk, cohort_size = workload.config.get("client.chunk", 0), workload.config.server.cohort_size
        num_stacks = -(-cohort_size // chunk) if chunk else cohort_size
        if num_stacks >= self.workers:
            return
        if chunk > 1:
            shared = f"{num_stacks} stack{'s' if num_stacks > 1 else ''} of up to {chunk} clients"
            advice = f"give client.chunk={max(1, cohort_size // self.workers)}"
        else:
            shared, advice = f"{num_stacks} client{'s' if num_stacks > 1 else ''}", "sample more"
        _log.warning(
            "engine.workers=%d was given, but a round has %s to share out; %s, or lower engine.workers.",
            self.workers,
            shared,
            advice,
        )
