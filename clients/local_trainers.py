"""Select the trainer of a run: `SequentialTrainer`, or one that a capability provides.

Exactly one provider takes a workload.  Engines, nodes, and worker processes all call `provider_of`.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from clients.trainer import LocalTrainer, SequentialTrainer
from fedsign.errors import ConfigError
from fedsign.extensions import extensions
from fedsign.records import ObjectiveSpec, TrainRequest
from fedsign.workload import Workload


class TrainerProvider:
    """Provides sequential training; capabilities add subclasses at the extension point `local_trainer`."""

    outlasts_messages = False  # whether it keeps processes between a node's messages

    def __init__(self, workload: Workload, workers: int = 1) -> None:
        self.workload, self.workers = workload, workers

    def decide(self, spec: ObjectiveSpec) -> Workload:
        """Resolve every `auto` in this provider's settings, before a run.

        Raises:
            ConfigError: the settings choose this provider, but it cannot train the workload.
        """
        return self.workload

    def takes(self) -> bool:
        """Whether it trains this workload, whose settings were decided."""
        return self.workers == 1

    def check(self) -> None:
        """Raise ConfigError if something is missing on this machine, which will train."""

    def open(self, *, logs: Path, in_process: bool) -> AbstractContextManager[LocalTrainer]:
        """Open a trainer, which ends its processes on exit.

        Args:
            logs: A folder for the output of its processes.
            in_process: Whether the run is in this process and may keep replies.  If not, each reply is encoded before
                the next client trains.
        """
        return nullcontext(SequentialTrainer(self.workload, copies=in_process))

    def shut_down(self, *, logs: Path) -> None:
        """End what a node kept between messages, after the run."""


def decided(workload: Workload, spec: ObjectiveSpec) -> Workload:
    """Let all capabilities decide their `auto` settings, once before a run.

    Raises:
        ConfigError: the workload cannot be trained with these settings.
    """
    for provider in extensions("local_trainer"):
        workload = provider(workload).decide(spec)
    return workload


def provider_of(workload: Workload, workers: int = 1) -> TrainerProvider:
    """The provider that trains a decided workload in `workers` processes.

    Raises:
        ConfigError: the required capability is not installed.
    """
    for provider in (*extensions("local_trainer"), TrainerProvider):  # the core's last: it takes what is left
        candidate: TrainerProvider = provider(workload, workers)
        if candidate.takes():
            return candidate
    raise ConfigError(
        f"engine.workers={workers} was given, but the capability that trains clients in several processes is not "
        "installed; install all of FedSign, or use engine.workers=1."
    )


def chunks_of(requests: Iterable[TrainRequest], size: int) -> Iterator[list[TrainRequest]]:
    """Chunks of at most `size` requests to train together."""
    for alike in _alike(requests):
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


def _alike(requests: Iterable[TrainRequest]) -> list[list[TrainRequest]]:
    """Group requests by round and objective, in the order of first appearance."""
    groups: list[list[TrainRequest]] = []
    for request in requests:
        for group in groups:
            # compared, not hashed: an objective's settings are a dict
            if group[0].round == request.round and group[0].objective == request.objective:
                group.append(request)
                break
        else:
            groups.append([request])
    return groups
