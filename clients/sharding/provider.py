"""Ranks that train one client together, where `client.sharding` asks for them."""

from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

from clients.local_trainers import TrainerProvider
from clients.trainer import LocalTrainer
from fedsign.records import ObjectiveSpec
from fedsign.sharding.section import ShardingSection
from fedsign.workload import Workload


class ShardingProvider(TrainerProvider):
    """See TrainerProvider."""

    outlasts_messages = True

    def decide(self, spec: ObjectiveSpec) -> Workload:
        """See TrainerProvider."""
        if not self.takes():
            return self.workload
        from clients.sharding.decide import sharded

        return sharded(self.workload)

    def takes(self) -> bool:
        """See TrainerProvider."""
        return ShardingSection.of(self.workload.config).ranks > 1

    def check(self) -> None:
        """See TrainerProvider."""
        settings = ShardingSection.of(self.workload.config)
        if settings.machines > 1:
            settings.where_machines_join()

    def open(self, *, logs: Path, in_process: bool) -> AbstractContextManager[LocalTrainer]:
        """Ranks of this process, or at a node those of a daemon, which outlast the message."""
        if in_process:
            from clients.sharding.group import ShardGroup

            return closing(ShardGroup(self.workload, logs=logs))
        from clients.sharding.node import AtDaemon

        return nullcontext(AtDaemon(self.workload, logs=logs))

    def shut_down(self, *, logs: Path) -> None:
        """See TrainerProvider."""
        from clients.sharding.node import AtDaemon

        AtDaemon(self.workload, logs=logs).shut_down()
