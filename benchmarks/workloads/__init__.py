"""The table of workloads: each is an experiment and the result that it must reach.

All competitors train the same: `benchmarks.export` writes a workload's arrays, split, cohorts and initial parameters
into a folder, and defines how batches are drawn.  To add a workload, add a value in a file of this folder, as in the
tables of `fedsign.registry`.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkWorkload:
    """A workload. `experiment` holds changes to FedSign's default experiment."""

    name: str
    title: str
    about: str  # the computation, for docs/benchmarks.md
    experiment: dict[str, Any]
    network: str  # a function of benchmarks.networks, for competitors without FedSign's models
    network_settings: dict[str, Any] = field(default_factory=dict)
    warm_up_rounds: int = 1  # of each repetition, excluded from its statistics
    competitors: tuple[str, ...] = ()  # empty: all
    min_accuracy: float  # below this, the competitor has not learned
    loss_tolerance: float | None = None  # relative to the bare loop; None: dropout draws differ
    devices: tuple[str, ...] = ("cpu", "cuda")
    curve: tuple[str, float] | None = None  # axis and position, for a point of a scaling curve


def all_workloads() -> dict[str, BenchmarkWorkload]:
    """Return all workloads by name, in the order of measurement."""
    from benchmarks.workloads.scaling import CURVES
    from benchmarks.workloads.silo import SILO, SILO_LARGE
    from benchmarks.workloads.w1 import W1
    from benchmarks.workloads.w2 import W2

    return {work.name: work for work in (W1, W2, SILO, SILO_LARGE, *CURVES)}
