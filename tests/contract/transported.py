"""Runs over Flower's transport within one process: random node ids, all messages serialized as in Flower."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Message

from clients.app import client_app
from clients.node import EXPERIMENT_KEY, STATE_KEY
from fedsign.config import ExperimentConfig, from_dict
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.flower.shims import PARTITION_KEY
from fedsign.records import roles_of
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations.backends.base import intra_op_threads
from simulations.rounds import RoundLoop
from tests.contract.contexts import make_context
from tests.unit.test_flower_wire import Deployment

APP = client_app()
Node = Callable[[Message], Message]


def grid_of(config: ExperimentConfig, nodes: Sequence[Node]) -> PartitionGrid:
    """A grid that knows which node serves which partition."""
    grid = PartitionGrid(
        Deployment(list(nodes)),
        num_partitions=len(nodes),
        roles=roles_of(Workload(config).make_model()),
        leaves_process=True,
    )
    grid.roll_call(timeout_s=5)
    return grid


def node_of(config: ExperimentConfig, partition: int, states: Path) -> Node:
    """The project's ClientApp, serving a partition."""
    run_config = {EXPERIMENT_KEY: config.to_toml(), STATE_KEY: str(states)}
    context = make_context(partition, node_config={PARTITION_KEY: partition}, run_config=run_config)
    return lambda message: APP(message, context)


def run_with(
    config: ExperimentConfig,
    folder: RunFolder,
    nodes: Sequence[Node],
    *,
    before: Callable[[int], None] = lambda round: None,
) -> RunFolder:
    """The run with these nodes; `before` each round something may happen."""
    folder.path.mkdir(parents=True, exist_ok=True)
    with intra_op_threads(config.engine.threads):
        RoundLoop(Workload(config), grid_of(config, nodes), folder, lambda line: before(line["round"])).run()
    return folder


def over_flowers_transport(
    root: Path, experiment: dict[str, Any], *, before: Callable[[int, Path], None] = lambda round, folder: None
) -> RunFolder:
    """The run with the project's ClientApp; `before` a round something may happen to the clients' disk."""
    config, folder = from_dict(experiment), RunFolder(root / "transported")
    nodes = [node_of(config, partition, folder.clients) for partition in range(config.partition.num_clients)]
    return run_with(config, folder, nodes, before=lambda round: before(round, folder.clients))
