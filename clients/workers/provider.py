"""Several processes that train the clients of a round, where `engine.workers` asks for them."""

import logging
from contextlib import AbstractContextManager, closing
from pathlib import Path

from clients.local_trainers import TrainerProvider
from clients.trainer import LocalTrainer

_log = logging.getLogger("fedsign")


class WorkersProvider(TrainerProvider):
    """See TrainerProvider."""

    def takes(self) -> bool:
        """See TrainerProvider."""
        return self.workers > 1

    def check(self) -> None:
        """See TrainerProvider."""
        from clients.workers.pool import devices_of

        devices_of(self.workload, self.workers)

    def open(self, *, logs: Path, in_process: bool) -> AbstractContextManager[LocalTrainer]:
        """See TrainerProvider."""
        from clients.workers.pool import Workers, devices_of

        self._warn_of_idle_workers()
        return closing(Workers(self.workload, devices=devices_of(self.workload, self.workers), logs=logs))

    def _warn_of_idle_workers(self) -> None:
        """A stack is one worker's work, and how many clients it holds must not depend on the number of workers."""
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
