"""Which trainer trains the clients of a run: `SequentialTrainer`, or what a capability offers in its place.

Exactly one provider takes a workload.  The engines, a node and a worker process all ask `provider_of`.
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
    """Trains one client after another; capabilities derive theirs, and add them at the extension point `local_trainer`."""

    outlasts_messages = False  # whether nodes keep processes for it between messages

    def __init__(self, workload: Workload, workers: int = 1) -> None:
        self.workload, self.workers = workload, workers

    def decide(self, spec: ObjectiveSpec) -> Workload:
        """Before a run: the workload with every `auto` in this provider's settings replaced.

        Raises:
            ConfigError: the settings ask for this provider, and it cannot train the workload.
        """
        return self.workload

    def takes(self) -> bool:
        """Whether it trains the clients of this workload, which was decided."""
        return self.workers == 1

    def check(self) -> None:
        """On the machine that will train: raise ConfigError for what is missing there."""

    def open(self, *, logs: Path, in_process: bool) -> AbstractContextManager[LocalTrainer]:
        """A trainer, which ends its processes on exit.

        Args:
            logs: A folder for the output of its processes.
            in_process: Whether the run is in this process, and may keep replies; else each is encoded before the next client trains.
        """
        return nullcontext(SequentialTrainer(self.workload, copies=in_process))

    def shut_down(self, *, logs: Path) -> None:
        """At a node whose run is over: end what was kept between messages."""


def decided(workload: Workload, spec: ObjectiveSpec) -> Workload:
    """The workload with what capabilities' settings leave open decided, once before a run.

    Raises:
        ConfigError: it cannot be trained as its settings ask.
    """
    for provider in extensions("local_trainer"):
        workload = provider(workload).decide(spec)
    return workload


def provider_of(workload: Workload, workers: int = 1) -> TrainerProvider:
    """Who trains the clients of a decided workload in so many processes.

    Raises:
        ConfigError: it takes a capability that is not here.
    """
    for provider in (*extensions("local_trainer"), TrainerProvider):
        found: TrainerProvider = provider(workload, workers)
        if found.takes():
            return found
    raise ConfigError(
        f"engine.workers={workers} was given, but the capability that trains clients in several processes is not installed; install "
        "all of FedSign, or use engine.workers=1."
    )


def chunks_of(requests: Iterable[TrainRequest], size: int) -> Iterator[list[TrainRequest]]:
    """The requests that are trained together, `size` at most."""
    for alike in _alike(requests):
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


def _alike(requests: Iterable[TrainRequest]) -> list[list[TrainRequest]]:
    """Groups of requests of one round and one objective, in the order of their first ones."""
    groups: list[list[TrainRequest]] = []
    for request in requests:
        for group in groups:
            if group[0].round == request.round and group[0].objective == request.objective:
                group.append(request)
                break
        else:
            groups.append([request])
    return groups
