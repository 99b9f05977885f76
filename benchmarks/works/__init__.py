"""What is played: a work is an experiment, and what has to come out of it.

Every player trains the same: `benchmarks.export` writes the arrays of a work, the split, the clients of each round and the
first parameters into a folder, and says how a client's batches are drawn.  A table like those of `fedsign.registry`: a new
work is a value in one of the files here.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One work.  `experiment` is a tree of changes to FedSign's default experiment."""

    name: str
    title: str
    about: str  # what is computed, for docs/benchmarks.md
    experiment: dict[str, Any]
    network: str  # a function of benchmarks.networks, for those who do not know FedSign's models
    network_settings: dict[str, Any] = field(default_factory=dict)
    warm_up_rounds: int = 1  # of each repetition, told apart and left out
    players: tuple[str, ...] = ()  # none: all
    min_accuracy: float  # who stays below has not learnt
    loss_tolerance: float | None = None  # relative to the bare loop's; None: dropout's draws differ between players
    devices: tuple[str, ...] = ("cpu", "cuda")
    curve: tuple[str, float] | None = None  # a point of a scaling curve: its axis, and where on it


def all_works() -> dict[str, Work]:
    """All works by name, in the order in which they are played."""
    from benchmarks.works.scaling import CURVES
    from benchmarks.works.silo import SILO, SILO_LARGE
    from benchmarks.works.w1 import W1
    from benchmarks.works.w2 import W2

    return {work.name: work for work in (W1, W2, SILO, SILO_LARGE, *CURVES)}
