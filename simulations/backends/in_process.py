"""In process: train clients one after another or in cohorts, without serialization. The default, and the reference."""

from contextlib import closing
from functools import partial
from typing import Annotated

from pydantic import Field

from clients.app import in_process_handler
from clients.local_trainers import provider_of
from clients.middleware import with_middleware
from clients.state.cache import StateCache
from fedsign.federation.exchange import DirectExchange
from fedsign.flower.in_process import InProcessGrid
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations.backends.base import intra_op_threads
from simulations.rounds import OnRound, RoundLoop


class InProcess:
    """Settings: `workers`, the number of processes that train clients; 1 trains in this process."""

    trains_here = keeps_processes = True

    def __init__(self, *, workers: Annotated[int, Field(ge=1, le=1024)] = 1) -> None:
        self.workers = workers

    def check(self, workload: Workload) -> None:
        """Check that workers support this experiment."""
        provider_of(workload, self.workers).check()

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """Run the round loop in this process, with worker processes if there are any."""
        config = workload.config
        cache_bytes = int(config.client.state_cache_mib * 2**20)
        with (
            intra_op_threads(config.engine.threads),
            provider_of(workload, self.workers).open(logs=folder.path / "logs", in_process=True) as local,
            closing(StateCache(folder.clients, budget_bytes=cache_bytes, run=folder.id)) as states,
        ):
            trainer = with_middleware(local, workload, in_process=True, folder=folder.clients)
            num_partitions, roles = config.partition.num_clients, workload.roles
            # Grid and shortcut reach the same trainer and states; only strategies that build or read messages need the
            # grid.
            grid = PartitionGrid(
                InProcessGrid(num_partitions, in_process_handler(trainer, states, workload)),
                num_partitions=num_partitions,
                roles=roles,
                max_examples=workload.max_examples,
            )
            direct = DirectExchange(
                partial(trainer.train_many, states=states),
                num_partitions=num_partitions,
                roles=roles,
                max_examples=workload.max_examples,
            )
            RoundLoop(
                workload,
                grid,
                folder,
                on_round,
                direct=direct,
                states=states,
                evaluation_threads=self.workers,  # the workers are idle while the server evaluates
            ).run()
