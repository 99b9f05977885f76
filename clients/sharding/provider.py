"""The provider of sharded training, chosen by `client.sharding`."""

from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

from clients.local_trainers import TrainerProvider
from clients.trainer import LocalTrainer
from fedsign.records import ObjectiveSpec
from fedsign.sharding.section import ShardingSection
from fedsign.workload import Workload


class ShardingProvider(TrainerProvider):
    """Trains each client in several processes, which share its model states."""

    outlasts_messages = True

    def decide(self, spec: ObjectiveSpec) -> Workload:
        """Decide `client.sharding.strategy`."""
        if not self.takes():
            return self.workload
        from clients.sharding.decide import sharded

        return sharded(self.workload)

    def takes(self) -> bool:
        """Whether there is more than one rank."""
        return ShardingSection.of(self.workload.config).ranks > 1

    def check(self) -> None:
        """Check the settings for joining machines."""
        settings = ShardingSection.of(self.workload.config)
        if settings.machines > 1:
            settings.where_machines_join()

    def open(self, *, logs: Path, in_process: bool) -> AbstractContextManager[LocalTrainer]:
        """Use this process's ranks, or at a node those of a daemon, which outlive the message."""
        if in_process:
            from clients.sharding.group import ShardGroup

            return closing(ShardGroup(self.workload, logs=logs))
        from clients.sharding.node import AtDaemon

        return nullcontext(AtDaemon(self.workload, logs=logs))

    def shut_down(self, *, logs: Path) -> None:
        """End the node's daemon."""
        from clients.sharding.node import AtDaemon

        AtDaemon(self.workload, logs=logs).shut_down()
