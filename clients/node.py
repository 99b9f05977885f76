"""A node that runs the ClientApp: its clients, their states, and what it reports.

This is the node of a simulation (Ray), which serves one client and reports everything.  `clients.deployment.node` is a
SuperNode with its own settings.
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

EXPERIMENT_KEY, STATE_KEY, RUN_KEY = "experiment", "state-folder", "run"  # in the run configuration


@dataclass(frozen=True)
class Node:
    """A node of a simulation, configured by its engine."""

    context: Context

    @property
    def partitions(self) -> tuple[int, ...]:
        """The clients that it serves."""
        return (int(self.context.node_config[PARTITION_KEY]),)

    @property
    def experiment(self) -> str:
        """The experiment's configuration as TOML."""
        return str(self.context.run_config[EXPERIMENT_KEY])

    @property
    def workload(self) -> Workload:
        """The experiment as this node runs it, cached across messages."""
        return workload_of(self.experiment)

    def at_work(self) -> Workload:
        """The workload, after setting the experiment's number of threads."""
        # it changes the order of summation, and so the result
        torch.set_num_threads(self.workload.config.engine.threads)
        return self.workload

    @property
    def states(self) -> ClientStore:
        """The store of its clients' states."""
        given = self.context.run_config
        return ClientStore(Path(str(given[STATE_KEY])), run=str(given.get(RUN_KEY, "")))

    def answer_roll_call(self, question: Mapping[str, object]) -> Mapping[str, str]:
        """Additional entries of the roll-call answer, before the first round.

        Raises:
            FedSignError: the node cannot take part.
        """
        return {}

    def reported(self, failure: Failure) -> Failure:
        """A failure as reported to the server."""
        return failure
