"""The table of competitors. To add one, add a value here, and a module if it runs in a new way.

`module` is a file in this folder, run as `python -m benchmarks.competitors.<module>` by the competitor's Python.
`settings` are passed to it; for `ours` they are changes to the workload's experiment.  `environment` names the
requirements in benchmarks/peers; None is FedSign's own Python.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Competitor:
    """A row of every table.

    `workloads`: those it is meant for.  `refused`: those it cannot run, with the reason.  A competitor of another
    precision is excluded where all must reach the same loss.
    """

    name: str
    title: str
    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None
    one_process: bool = True  # if so, its processor time is complete and comparable
    refused: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    workloads: tuple[str, ...] = ()  # empty: all


BARE = "bare_loop"
FLOOR = "floor"

LARGE_MODELS = ("w2", "silo", "silo-large")

COMPETITORS: tuple[Competitor, ...] = (
    Competitor(name=BARE, title="bare PyTorch loop", module="bare_loop"),
    Competitor(name=FLOOR, title="floor", module="floor"),
    Competitor(name="sequential", title="ours, sequential", module="ours", settings={"client": {"path": "sequential"}}),
    Competitor(name="cohort", title="ours, cohort", module="ours", settings={"client": {"path": "cohort"}}),
    Competitor(
        name="workers_2",
        title="ours, 2 workers",
        module="ours",
        settings={"client": {"path": "sequential"}, "engine": {"workers": 2}},
        one_process=False,
        devices=("cpu",),
        workloads=LARGE_MODELS,
    ),
    Competitor(
        name="bf16",
        title="ours, bf16",
        module="ours",
        settings={"client": {"path": "sequential"}, "engine": {"precision": "bf16"}},
        workloads=LARGE_MODELS,
    ),
    Competitor(
        name="bf16_workers_2",
        title="ours, 2 x bf16",
        module="ours",
        settings={"client": {"path": "sequential"}, "engine": {"precision": "bf16", "workers": 2}},
        one_process=False,
        devices=("cpu",),
        workloads=LARGE_MODELS,
    ),
    Competitor(
        name="tf32",
        title="ours, TF32",
        module="ours",
        settings={"client": {"path": "sequential"}, "engine": {"tf32": True}},
        devices=("cuda",),
        workloads=LARGE_MODELS,
    ),
    Competitor(name="pfl_1", title="pfl-research", module="pfl_research", environment="pfl", settings={"processes": 1}),
    Competitor(
        name="pfl_2",
        title="pfl, 2 processes",
        module="pfl_research",
        environment="pfl",
        settings={"processes": 2},
        one_process=False,
    ),
    Competitor(name="fedlab", title="FedLab, serial", module="fedlab_serial", environment="fedlab"),
    Competitor(
        name="flower_ray",
        title="Flower on Ray, 2",
        module="flower_ray",
        environment="flower",
        settings={"actors": 2},
        one_process=False,
    ),
)


def competitor_named(name: str) -> Competitor:
    """Return a competitor by name."""
    found = {competitor.name: competitor for competitor in COMPETITORS}
    if name not in found:
        raise SystemExit(f"there is no competitor '{name}'; expected one of {', '.join(found)}.")
    return found[name]
