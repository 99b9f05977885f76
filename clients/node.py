"""A node of an engine that runs the ClientApp in other processes: which clients it serves, where their states lie, what it tells.

Here a node of a simulation (Ray), which serves one client and keeps nothing to itself.  What a SuperNode decides for itself:
`clients.deployment.node`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context

from clients.state.store import ClientStore
from fedsign.flower.shims import PARTITION_KEY
from fedsign.records import Failure
from fedsign.workload import Workload, workload_of

EXPERIMENT_KEY, STATE_KEY = "experiment", "state-folder"  # in the run configuration


@dataclass(frozen=True)
class Node:
    """A node of a simulation, by what its engine tells it."""

    context: Context

    @property
    def partitions(self) -> tuple[int, ...]:
        """The clients that it serves."""
        return (int(self.context.node_config[PARTITION_KEY]),)

    @property
    def experiment(self) -> str:
        """The configuration that travels, as TOML."""
        return str(self.context.run_config[EXPERIMENT_KEY])

    @property
    def workload(self) -> Workload:
        """The experiment as this node plays it; a process keeps it from one message to the next."""
        return workload_of(self.experiment)

    def at_work(self) -> Workload:
        """The same, with the experiment's number of threads."""
        torch.set_num_threads(self.workload.config.engine.threads)
        return self.workload

    @property
    def states(self) -> ClientStore:
        """Where its clients' states lie."""
        return ClientStore(Path(str(self.context.run_config[STATE_KEY])))

    def answer_roll_call(self, question: Mapping[str, object]) -> Mapping[str, str]:
        """What it answers besides its partitions, before the first round.

        Raises:
            FedSignError: it cannot take part.
        """
        return {}

    def told(self, failure: Failure) -> Failure:
        """A failure as the server gets it."""
        return failure
