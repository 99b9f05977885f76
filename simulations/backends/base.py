"""The contract of an engine."""

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
    """Plays all rounds of a run; its constructor's parameters are the settings of [engine]."""

    def check(self, workload: Workload) -> None:
        """Raise FedSignError for what it could not play, before a run begins."""
        ...

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """Run to the last round; `on_round` is called in this process after each."""
        ...


@contextmanager
def intra_op_threads(num_threads: int) -> Iterator[None]:
    """Lend torch a number of threads: the order of its sums depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
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
    """An engine's grid of nodes in other processes, after a roll call (see `fedsign.flower.nodes`)."""
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
