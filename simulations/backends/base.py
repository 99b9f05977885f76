"""The interface of an engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from flwr.serverapp import Grid

from fedsign.flower.nodes import NO_HOOKS, SiteHooks
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations.rounds import OnRound


class Engine(Protocol):
    """Runs all rounds of an experiment. The constructor's parameters are the settings of `[engine]`."""

    def check(self, workload: Workload) -> None:
        """Raise FedSignError, before the run begins, for anything this engine does not support."""
        ...

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """Run to the last round, calling `on_round` in this process after each one."""
        ...


@contextmanager
def intra_op_threads(num_threads: int) -> Iterator[None]:
    """Set torch's number of threads temporarily. It determines the order of sums, and thereby their bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        # the process may be a notebook or a worker with other runs to run
        torch.set_num_threads(before)


def called(
    grid: Grid,
    workload: Workload,
    *,
    timeout_s: float,
    question: Mapping[str, str] | None = None,
    hooks: SiteHooks = NO_HOOKS,
    at_least: int | None = None,
) -> PartitionGrid:
    """Connect an engine's grid to nodes in other processes, starting with a roll call (see `fedsign.flower.nodes`)."""
    num_partitions, roles = workload.config.partition.num_clients, workload.roles
    partitions = PartitionGrid(
        grid,
        num_partitions=num_partitions,
        roles=roles,
        leaves_process=True,
        max_examples=workload.max_examples,
        hooks=hooks,
    )
    partitions.roll_call(timeout_s=timeout_s, question=question, at_least=at_least)
    return partitions
