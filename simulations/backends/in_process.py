"""In process: clients one after another or in stacks, nothing serialised.  The fast default, and the reference."""

from clients.app import in_process_handler
from clients.cohort import CohortTrainer
from clients.state_cache import StateCache
from clients.trainer import LocalTrainer, SequentialTrainer
from fedsign.exchange import DirectExchange
from fedsign.flower.in_process import InProcessGrid
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.records import roles_of
from fedsign.results import RunFolder
from fedsign.workload import Workload
from simulations.backends.base import intra_op_threads
from simulations.rounds import OnRound, RoundLoop


class InProcess:
    """Takes no settings."""

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """See Engine."""
        config = workload.config
        cache = StateCache(folder.clients, budget_bytes=int(config.client.state_cache_mib * 2**20))
        with intra_op_threads(config.engine.threads), cache.closed_at_the_end() as states:
            trainer = trainer_of(workload)
            num_partitions, roles = config.partition.num_clients, roles_of(workload.make_model())
            grid = PartitionGrid(
                InProcessGrid(num_partitions, in_process_handler(trainer, states)),
                num_partitions=num_partitions,
                roles=roles,
            )
            direct = DirectExchange(
                lambda requests: trainer.train_many(requests, states), num_partitions=num_partitions, roles=roles
            )
            RoundLoop(workload, grid, folder, on_round, direct=direct, keep_states=states.commit).run()


def trainer_of(workload: Workload) -> LocalTrainer:
    """What `client.path` says; it was decided before (`clients.paths.on_path`)."""
    client = workload.config.client
    match client.path:
        case "sequential":
            return SequentialTrainer(workload)
        case "cohort":
            return CohortTrainer(workload, chunk=client.chunk)
        case _:
            raise ValueError(f"client.path={client.path} is not decided; expected is sequential or cohort.")
