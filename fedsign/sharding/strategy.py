"""The fourteen strategies and their collectives.

A strategy sets the granularity of parameters, gradients, and optimizer states.  Of the 27 combinations the paper keeps
those in which "the partitioning granularity of os should be the same as or finer than that of p and g" (section 3.1.1):
a coarser optimizer state needs more memory and saves no communication.

The time model and the engine both use the lists in this file, so plan and execution agree.
"""

from dataclasses import dataclass
from enum import StrEnum

from fedsign.errors import ConfigError
from fedsign.sharding.layout import Granularity

N, I, G = Granularity.NONE, Granularity.GROUP, Granularity.GLOBAL  # noqa: E741 - the paper's letters


class Scope(StrEnum):
    """The ranks of a collective; `inter` joins the ranks with the same local number in all groups."""

    INTRA = "intra"
    INTER = "inter"
    ALL = "global"

    @property
    def whole(self) -> Granularity:
        """The granularity of a tensor that is whole on each rank of the scope."""
        return I if self is Scope.INTER else N

    @property
    def part(self) -> Granularity:
        """The granularity when each rank of the scope has its part."""
        return I if self is Scope.INTRA else G


class Operation(StrEnum):
    """The kind of a collective."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    EXCHANGE = "exchange"  # sends and receives between any ranks; no strategy plans one


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """An operation between the ranks of a scope."""

    scope: Scope
    operation: Operation

    def __str__(self) -> str:
        return f"{self.scope} {self.operation}"


_SCOPES = {(scope.whole, scope.part): scope for scope in Scope}
_ALIKE = {N: (Scope.ALL,), I: (Scope.INTER,), G: ()}  # the scope in which a part is replicated


def _between(operation: Operation, coarse: Granularity, fine: Granularity) -> tuple[Collective, ...]:
    """The collective between a coarse and a fine granularity; none if they are equal."""
    return () if coarse is fine else (Collective(scope=_SCOPES[coarse, fine], operation=operation),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Granularities of parameters, gradients and optimizer states: P_{p+g+os}."""

    params: Granularity
    gradients: Granularity
    states: Granularity

    @property
    def name(self) -> str:
        """The paper's three-letter name."""
        return f"{self.params}{self.gradients}{self.states}"

    @property
    def known_as(self) -> str:
        """The usual name, according to the paper (section 3.1.1); empty if there is none."""
        return _KNOWN_AS.get(self.name, "")

    @property
    def gather_params(self) -> tuple[Collective, ...]:
        """Before a unit's forward, and again before its backward."""
        return gather_all(self.params)

    @property
    def reduce_gradients(self) -> tuple[Collective, ...]:
        """After a unit's backward, in every micro-batch."""
        return _between(Operation.REDUCE_SCATTER, N, self.gradients)

    @property
    def sync_gradients(self) -> tuple[Collective, ...]:
        """Once per step, before the optimizer."""
        scattered = _between(Operation.REDUCE_SCATTER, self.gradients, self.states)
        return scattered + tuple(
            Collective(scope=scope, operation=Operation.ALL_REDUCE) for scope in _ALIKE[self.states]
        )

    @property
    def sync_params(self) -> tuple[Collective, ...]:
        """Once per step, after the optimizer."""
        return _between(Operation.ALL_GATHER, self.params, self.states)


def gather_all(granularity: Granularity) -> tuple[Collective, ...]:
    """The collectives that replicate a state on every rank."""
    return _between(Operation.ALL_GATHER, N, granularity)


_KNOWN_AS = {"NNN": "DDP", "NNG": "ZeRO-1", "NGG": "ZeRO-2", "GGG": "ZeRO-3", "III": "MiCS"}


def _kept() -> tuple[Strategy, ...]:
    every = (Strategy(params=p, gradients=g, states=s) for p in Granularity for g in Granularity for s in Granularity)
    finer = {(N, N), (N, I), (N, G), (I, I), (I, G), (G, G)}
    return tuple(each for each in every if {(each.params, each.states), (each.gradients, each.states)} <= finer)


STRATEGIES = {strategy.name: strategy for strategy in _kept()}
"""The paper's fourteen strategies, by name."""

PAPER = ("NII", "NIG", "NGG", "III", "IIG", "IGG", "ING", "GGG")
"""The strategies in the paper's experiments (section 4)."""


def strategy_of(name: str) -> Strategy:
    """Look up a strategy by its three letters.

    Raises:
        ConfigError: it does not exist, or the paper excludes it.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    reason = ""
    if len(name) == 3 and set(name) <= {*Granularity}:
        reason = ": optimizer states coarser than parameters or gradients cost memory and save no communication"
    raise ConfigError(f"sharding strategy '{name}' was given{reason}; choose one of {', '.join(STRATEGIES)}.")
