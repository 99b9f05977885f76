"""The evaluation of a round: on the server's test samples, unless a capability evaluates elsewhere (extension point `evaluation`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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


Evaluate = Callable[[int, Tensors], Evaluation]
"""Evaluates the model of a round, given as its tensors."""


def evaluator_for(workload: Workload, model: WorkingModel, grid: PartitionGrid, *, num_threads: int) -> Evaluate:
    """A capability's way to evaluate, or the server's.

    At the extension point are functions `(workload, grid, *, num_threads)` that give an object with such a method `evaluate`, or
    None for the server.
    """
    for make in extensions("evaluation"):
        if (evaluator := make(workload, grid, num_threads=num_threads)) is not None:
            evaluate: Evaluate = evaluator.evaluate
            return evaluate

    def on_the_server(round: int, tensors: Tensors) -> Evaluation:
        model.load(tensors)
        return Evaluation(figures=workload.evaluate(model.module, num_threads=num_threads))

    return on_the_server
