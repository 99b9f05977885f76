"""The evaluation of a round: on the server's test samples, unless a capability evaluates elsewhere (extension point `evaluation`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from clients.working_model import WorkingModel
from fedsign.extensions import extensions
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.records import Failure, Tensors
from fedsign.storage.results import Line
from fedsign.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A round's figures; `lines`: what is appended to further files of the run's folder, by their names."""

    figures: dict[str, float]
    failures: Sequence[Failure] = ()
    bytes_down: int = 0
    lines: Mapping[str, Line] = field(default_factory=dict)


class Evaluator(Protocol):
    """Evaluates the model of each round."""

    def evaluate(self, round: int, tensors: Tensors) -> Evaluation:
        """Figures of a model, given as its tensors."""
        ...


class MakeEvaluator(Protocol):
    """The extension point `evaluation`."""

    def __call__(self, workload: Workload, grid: PartitionGrid, *, num_threads: int) -> Evaluator | None:
        """Who evaluates this experiment; None: the server."""
        ...


@dataclass(kw_only=True, slots=True)
class ServerEvaluator:
    """Evaluates on the server's test samples."""

    workload: Workload
    model: WorkingModel
    num_threads: int = 1

    def evaluate(self, round: int, tensors: Tensors) -> Evaluation:
        """See Evaluator."""
        self.model.load(tensors)
        return Evaluation(figures=self.workload.evaluate(self.model.module, num_threads=self.num_threads))


def evaluator_for(workload: Workload, model: WorkingModel, grid: PartitionGrid, *, num_threads: int) -> Evaluator:
    """A capability's evaluator, or the server's."""
    makers: tuple[MakeEvaluator, ...] = extensions("evaluation")
    for make in makers:
        evaluator = make(workload, grid, num_threads=num_threads)
        if evaluator is not None:
            return evaluator
    return ServerEvaluator(workload=workload, model=model, num_threads=num_threads)
