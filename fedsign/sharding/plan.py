"""Estimate memory and time of each strategy, and rank them.

Paper: arXiv 2310.06003, section 3.1 and appendix A.3.

    memory of a rank = 2 Psi / d_p + 2 Psi' / d_g + 12 Psi' / d_os       (mixed precision with Adam)
    T = max(t_comm, t_comp),  t_comm = (t_param + t_gradient) s + t_sync_g + t_sync_p     (formulas 1 and 2)

Psi -> params, Psi' -> trainable, s -> accumulate, d -> `Grouping.split`.  The cells of the paper's Tables 4 to 7 are
rebuilt from ring costs (`fedsign.sharding.traffic`); t_param covers the gathers of forward and backward.

Differs: communication is assumed to overlap fully with computation, and `Network.link` also covers ranks that share one
link per group, where the paper's tables assume one link per rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedsign.errors import ConfigError
from fedsign.sharding.layout import Grouping
from fedsign.sharding.strategy import STRATEGIES, Collective, Strategy
from fedsign.sharding.traffic import Network, seconds

GATHERS = 2
"""Gathers of a unit's parameters per micro-batch: forward and backward."""

NEAR = 1.05
"""Strategies within this factor of the fastest are ranked by memory."""


Standing = Literal["near", "slower", "too_large"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes per element: bf16 parameters and gradients; fp32 masters and Adam's two moments."""

    param: float = 2
    gradient: float = 2
    state: float = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The training task: sizes in elements, and micro-batches per step."""

    params: float
    trainable: float
    accumulate: int = 1
    sizes: StateBytes = StateBytes()

    def __post_init__(self) -> None:
        if not 0 < self.trainable <= self.params:
            raise ConfigError(
                f"{self.trainable:g} trainable of {self.params:g} parameters were given; "
                "give more than 0 and at most all."
            )
        if self.accumulate < 1:
            raise ConfigError(f"accumulate={self.accumulate} was given; a step has at least one micro-batch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A strategy's memory per rank and seconds per step."""

    strategy: Strategy
    memory_bytes: float
    param_s: float
    gradient_s: float
    sync_gradient_s: float
    sync_param_s: float
    compute_s: float

    @property
    def communication_s(self) -> float:
        """t_comm per step."""
        return self.param_s + self.gradient_s + self.sync_gradient_s + self.sync_param_s

    @property
    def step_s(self) -> float:
        """T, the maximum of communication and computation, which overlap."""
        return max(self.communication_s, self.compute_s)


def memory_bytes(strategy: Strategy, task: Task, grouping: Grouping) -> float:
    """Model states per rank, without activations and gathered units."""
    sizes = task.sizes
    return (
        sizes.param * task.params / grouping.split(strategy.params)
        + sizes.gradient * task.trainable / grouping.split(strategy.gradients)
        + sizes.state * task.trainable / grouping.split(strategy.states)
    )


def estimate(
    strategy: Strategy, task: Task, *, grouping: Grouping, network: Network, compute_s: float = 0.0
) -> Estimate:
    """Memory and time of one strategy; `compute_s` is the computation time per step, over all micro-batches."""

    def total_s(collectives: Sequence[Collective], tensor_bytes: float) -> float:
        return sum(seconds(each, tensor_bytes=tensor_bytes, grouping=grouping, network=network) for each in collectives)

    params_bytes = task.sizes.param * task.params
    trainable_bytes = task.sizes.param * task.trainable
    gradient_bytes = task.sizes.gradient * task.trainable
    return Estimate(
        strategy=strategy,
        memory_bytes=memory_bytes(strategy, task, grouping),
        param_s=task.accumulate * GATHERS * total_s(strategy.gather_params, params_bytes),
        gradient_s=task.accumulate * total_s(strategy.reduce_gradients, gradient_bytes),
        sync_gradient_s=total_s(strategy.sync_gradients, gradient_bytes),
        sync_param_s=total_s(strategy.sync_params, trainable_bytes),
        compute_s=compute_s,
    )


def rank(
    task: Task,
    *,
    grouping: Grouping,
    network: Network,
    memory_bytes: float,
    compute_s: float = 0.0,
    names: Iterable[str] = tuple(STRATEGIES),
) -> list[tuple[Standing, Estimate]]:
    """Strategies in the order in which to try them.

    near: within 5 % of the fastest that fits into a rank's memory, smallest first.
    slower: the others that fit, fastest first.
    too_large: those that do not fit, smallest first.
    """
    each = [estimate(STRATEGIES[name], task, grouping=grouping, network=network, compute_s=compute_s) for name in names]
    # only strategies that fit: the fastest of all may be one that nobody can use
    limit_s = NEAR * min((one.step_s for one in each if one.memory_bytes <= memory_bytes), default=0.0)
    by_standing: dict[Standing, list[Estimate]] = {"near": [], "slower": [], "too_large": []}
    for one in each:
        fits = one.memory_bytes <= memory_bytes
        by_standing["too_large" if not fits else "near" if one.step_s <= limit_s else "slower"].append(one)
    by_standing["near"].sort(key=lambda one: (one.memory_bytes, one.step_s))
    by_standing["slower"].sort(key=lambda one: (one.step_s, one.memory_bytes))
    by_standing["too_large"].sort(key=lambda one: one.memory_bytes)
    return [(standing, one) for standing, estimates in by_standing.items() for one in estimates]
