"""Evaluation of a round: on the server's test samples, or as a capability does it (extension point `evaluation`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clients.working_model import WorkingModel
from fedsign.evaluation import OnOutputs
from fedsign.extensions import extensions
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.records import Failure, Tensors
from fedsign.storage.results import Record
from fedsign.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A round's metrics. `records`: records to append to further files of the run's folder, by file name."""

    metrics: dict[str, float]
    failures: Sequence[Failure] = ()
    bytes_down: int = 0
    records: Mapping[str, Record] = field(default_factory=dict)


Evaluate = Callable[[int, Tensors], Evaluation]
"""Evaluates a round's model, given as its tensors."""


def evaluator_for(
    workload: Workload, model: WorkingModel, grid: PartitionGrid, *, num_threads: int, on_outputs: OnOutputs
) -> Evaluate:
    """Return a capability's evaluator, or the server's, whose outputs `on_outputs` observes.

    The extension point holds functions `(workload, grid, *, num_threads)`. Each returns an object with a method
    `evaluate`,
    or None to leave the evaluation to others.
    """
    # at most one capability takes the evaluation over
    for make in extensions("evaluation"):
        if (evaluator := make(workload, grid, num_threads=num_threads)) is not None:
            evaluate: Evaluate = evaluator.evaluate
            return evaluate

    def on_the_server(round: int, tensors: Tensors) -> Evaluation:
        model.load(tensors)
        metrics = workload.evaluate(model.module, num_threads=num_threads, on_outputs=on_outputs, round=round)
        model.release()  # on a GPU, the clients' model is next
        return Evaluation(metrics=metrics)

    return on_the_server
