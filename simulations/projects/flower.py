"""The Flower app of a project: the same experiment on the nodes that `flwr run` provides.

Server and nodes read `experiment.toml` from the app.  A node of Flower's simulation has `partition-id` and
`num-partitions`; the experiment's clients are dealt to the nodes in turn, so any number of nodes will do.

The run configuration has two keys: `results`, the folder on the server's machine where runs are written, and `set`,
changes as of `fedsign run --set`, with spaces between them.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import HttpGrid
from pydantic import Field

from clients import app as clients_app
from clients.node import Node
from clients.state.store import ClientStore
from fedsign import config as configs
from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.flower.shims import PARTITION_KEY, quiet_flower
from fedsign.flower.superlink_grid import SuperLinkGrid
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations import api
from simulations.backends.base import called, intra_op_threads
from simulations.rounds import OnRound, RoundLoop

RESULTS_KEY, SET_KEY = "results", "set"  # of the run configuration
_NUM_KEY = "num-partitions"  # Flower's name in the configuration of a simulated node
_GRID: ContextVar[Grid] = ContextVar("grid")


class FlowerGrid:
    """The engine of a project's Flower app: the grid that Flower hands to the ServerApp.

    `start_timeout_s`: how long to wait until all nodes have answered the roll call.
    """

    def __init__(self, *, start_timeout_s: Annotated[float, Field(gt=0)] = 300.0) -> None:
        self.start_timeout_s = start_timeout_s

    def check(self, workload: Workload) -> None:
        """Refuse a run outside of a Flower app."""
        if _GRID.get(None) is None:
            raise ConfigError(
                f"engine.name={_ENGINE} was given, but Flower has not started this process; use 'flwr run', or "
                "engine.name=in_process."
            )

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """Run the round loop over the grid's nodes."""
        grid = _GRID.get()
        with intra_op_threads(workload.config.engine.threads), quiet_flower():
            wrapped = SuperLinkGrid(grid) if isinstance(grid, HttpGrid) else grid
            partitions = called(wrapped, workload, timeout_s=self.start_timeout_s)
            RoundLoop(workload, partitions, folder, on_round).run()


_ENGINE = f"{__name__}:{FlowerGrid.__name__}"


@dataclass(frozen=True)
class ProjectNode(Node):
    """A node of a simulation, or a SuperNode, that runs a project's app."""

    path: Path = Path()  # of experiment.toml

    @property
    def partitions(self) -> tuple[int, ...]:
        """Every so many clients, beginning with the node's own number."""
        own, num_clients = self.context.node_config, self.workload.config.partition.num_clients
        if PARTITION_KEY not in own:
            raise ConfigError("the node has no partition-id; start it with --node-config 'partition-id=0'.")
        first = int(own[PARTITION_KEY])
        # a node too many serves a client that does not exist, and gets no work
        return tuple(range(first, max(num_clients, first + 1), int(own.get(_NUM_KEY, num_clients))))

    @property
    def experiment(self) -> str:
        """The experiment in the app."""
        return _config(self.path, str(self.context.run_config.get(SET_KEY, ""))).to_toml()

    @property
    def states(self) -> ClientStore:
        """The store of client states on this machine."""
        root = Path(os.environ.get("FLWR_HOME") or Path.home() / ".fedsign")
        return ClientStore(root / "clients" / f"run-{self.context.run_id}")


def server_app(experiment: Path) -> ServerApp:
    """Make a ServerApp that runs an experiment."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = _config(experiment, str(context.run_config.get(SET_KEY, "")))
        with _handed(grid):
            done = api.run(_with_results(config, context.run_config))
        print(f"run       {done.path}", flush=True)

    return app


def client_app(experiment: Path) -> ClientApp:
    """Make a ClientApp that trains an experiment's clients."""
    return clients_app.client_app(partial(ProjectNode, path=experiment))


@contextmanager
def _handed(grid: Grid) -> Iterator[None]:
    token = _GRID.set(grid)
    try:
        yield
    finally:
        _GRID.reset(token)


@lru_cache(maxsize=2)  # a process handles many messages
def _config(path: Path, changes: str) -> ExperimentConfig:
    return configs.load(path, [*shlex.split(changes), f"engine.name={_ENGINE}"])


def _with_results(config: ExperimentConfig, run_config: Mapping[str, Any]) -> ExperimentConfig:
    root = str(run_config.get(RESULTS_KEY, ""))
    return config.replace(**{"results.root": root}) if root else config
