"""The provider of cohort training, chosen by `client.path`."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from clients.cohort.section import CohortKeys
from clients.local_trainers import TrainerProvider
from clients.trainer import LocalTrainer
from fedsign.records import ObjectiveSpec
from fedsign.workload import Workload


class CohortProvider(TrainerProvider):
    """Trains cohorts as one stack of tensors."""

    def decide(self, spec: ObjectiveSpec) -> Workload:
        """Decide `client.path` and `client.chunk`."""
        keys = CohortKeys.of(self.workload.config)
        if keys.path == "sequential" and not keys.chunk:
            return self.workload
        from clients.cohort.paths import on_path

        return on_path(self.workload, spec)

    def takes(self) -> bool:
        """Whether the cohort path was chosen, in a single process."""
        return CohortKeys.of(self.workload.config).path == "cohort" and self.workers == 1

    def open(self, *, logs: Path, in_process: bool) -> AbstractContextManager[LocalTrainer]:
        """A cohort trainer, which has no other processes."""
        from clients.cohort.trainer import CohortTrainer

        return nullcontext(CohortTrainer(self.workload, chunk=CohortKeys.of(self.workload.config).chunk))
