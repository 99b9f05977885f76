"""Stacks of clients, where `client.path` asks for them."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from clients.cohort.section import CohortKeys
from clients.local_trainers import TrainerProvider
from clients.trainer import LocalTrainer
from fedsign.records import ObjectiveSpec
from fedsign.workload import Workload


class CohortProvider(TrainerProvider):
    """See TrainerProvider."""

    def decide(self, spec: ObjectiveSpec) -> Workload:
        """See TrainerProvider."""
        keys = CohortKeys.of(self.workload.config)
        if keys.path == "sequential" and not keys.chunk:
            return self.workload
        from clients.cohort.paths import on_path

        return on_path(self.workload, spec)

    def takes(self) -> bool:
        """See TrainerProvider."""
        return CohortKeys.of(self.workload.config).path == "cohort" and self.workers == 1

    def open(self, *, logs: Path, in_process: bool) -> AbstractContextManager[LocalTrainer]:
        """See TrainerProvider."""
        from clients.cohort.trainer import CohortTrainer

        return nullcontext(CohortTrainer(self.workload, chunk=CohortKeys.of(self.workload.config).chunk))
