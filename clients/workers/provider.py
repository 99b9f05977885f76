"""The provider of worker processes, chosen by `engine.workers`."""

import logging
from contextlib import AbstractContextManager, closing
from pathlib import Path

from clients.local_trainers import TrainerProvider
from clients.trainer import LocalTrainer

_log = logging.getLogger("fedsign")


class WorkersProvider(TrainerProvider):
    """Trains the clients of a round in several processes."""

    def takes(self) -> bool:
        """Whether there is more than one worker."""
        return self.workers > 1

    def check(self) -> None:
        """Check that there are enough devices."""
        from clients.workers.pool import devices_of

        devices_of(self.workload, self.workers)

    def open(self, *, logs: Path, in_process: bool) -> AbstractContextManager[LocalTrainer]:
        """Start the workers."""
        from clients.workers.pool import Workers, devices_of

        self._warn_of_idle_workers()
        return closing(Workers(self.workload, devices=devices_of(self.workload, self.workers), logs=logs))

    def _warn_of_idle_workers(self) -> None:
        """Warn if a round has too few units; a stack is one unit, and its size must not depend on the workers."""
        config = self.workload.config
        chunk, cohort_size = config.get("client.chunk", 0), config.server.cohort_size
        num = -(-cohort_size // (chunk or 1))
        if num >= self.workers:
            return
        plural = "s" if num > 1 else ""
        shared, advice = f"{num} client{plural}", "sample more"
        if chunk > 1:
            shared = f"{num} stack{plural} of up to {chunk} clients"
            advice = f"give client.chunk={max(1, cohort_size // self.workers)}"
        _log.warning(
            "engine.workers=%d was given, but a round has %s to share out; %s, or lower engine.workers.",
            self.workers, shared, advice,
        )  # fmt: skip
