"""The fourteen strategies, and which collectives each of them is made of.

A strategy says for parameters, gradients and optimiser states how finely each is sharded.  Of the 27 combinations the paper keeps
those in which "the partitioning granularity of os should be the same as or finer than that of p and g" (section 3.1.1):
a coarser optimiser state needs more memory and saves no communication.

The time model and the engine both read the lists of this file, so that what is planned is what is done.
"""

from dataclasses import dataclass
from enum import StrEnum

from fedsign.errors import ConfigError
from fedsign.sharding.layout import Granularity

N, I, G = Granularity.NONE, Granularity.GROUP, Granularity.GLOBAL  # noqa: E741 - the paper's letters
_FINENESS = {N: 0, I: 1, G: 2}


class Scope(StrEnum):
    """Between whom: `inter` joins the ranks of one local number over the groups."""

    INTRA = "intra"
    INTER = "inter"
    ALL = "global"


class Operation(StrEnum):
    """What is done."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One operation between the ranks of a scope."""

    scope: Scope
    operation: Operation

    def __str__(self) -> str:
        return f"{self.scope} {self.operation}"


def _gather(scope: Scope) -> Collective:
    return Collective(scope=scope, operation=Operation.ALL_GATHER)


def _scatter(scope: Scope) -> Collective:
    return Collective(scope=scope, operation=Operation.REDUCE_SCATTER)


def _reduce(scope: Scope) -> Collective:
    return Collective(scope=scope, operation=Operation.ALL_REDUCE)


# from coarse gradients to the optimiser's share of them
_SYNC_GRADIENTS: dict[tuple[Granularity, Granularity], tuple[Collective, ...]] = {
    (N, N): (_reduce(Scope.ALL),),
    (N, I): (_scatter(Scope.INTRA), _reduce(Scope.INTER)),
    (N, G): (_scatter(Scope.ALL),),
    (I, I): (_reduce(Scope.INTER),),
    (I, G): (_scatter(Scope.INTER),),
    (G, G): (),
}
# from parts to a coarser whole: (the whole, the parts)
_GATHER: dict[tuple[Granularity, Granularity], tuple[Collective, ...]] = {
    (N, N): (),
    (N, I): (_gather(Scope.INTRA),),
    (N, G): (_gather(Scope.ALL),),
    (I, I): (),
    (I, G): (_gather(Scope.INTER),),
    (G, G): (),
}
_SCATTER: dict[Granularity, tuple[Collective, ...]] = {
    N: (),
    I: (_scatter(Scope.INTRA),),
    G: (_scatter(Scope.ALL),),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Granularities of parameters, gradients and optimiser states: P_{p+g+os}."""

    params: Granularity
    gradients: Granularity
    states: Granularity

    @property
    def name(self) -> str:
        """The paper's three letters."""
        return f"{self.params}{self.gradients}{self.states}"

    @property
    def known_as(self) -> str:
        """What others call it, as far as the paper says (section 3.1.1); empty if it has no other name."""
        return _KNOWN_AS.get(self.name, "")

    @property
    def gather_params(self) -> tuple[Collective, ...]:
        """Before a unit is used, in forward and again in backward."""
        return gather_all(self.params)

    @property
    def reduce_gradients(self) -> tuple[Collective, ...]:
        """After a unit's backward, in every micro-batch."""
        return _SCATTER[self.gradients]

    @property
    def sync_gradients(self) -> tuple[Collective, ...]:
        """Once a step, before the optimiser's."""
        return _SYNC_GRADIENTS[self.gradients, self.states]

    @property
    def sync_params(self) -> tuple[Collective, ...]:
        """Once a step, after the optimiser's."""
        return _GATHER[self.params, self.states]


def gather_all(granularity: Granularity) -> tuple[Collective, ...]:
    """What makes a state whole everywhere."""
    return _GATHER[N, granularity]


_KNOWN_AS = {"NNN": "DDP", "NNG": "ZeRO-1", "NGG": "ZeRO-2", "GGG": "ZeRO-3", "III": "MiCS"}


def _kept() -> tuple[Strategy, ...]:
    every = (Strategy(params=p, gradients=g, states=s) for p in Granularity for g in Granularity for s in Granularity)
    return tuple(
        each for each in every if _FINENESS[each.states] >= max(_FINENESS[each.params], _FINENESS[each.gradients])
    )


STRATEGIES = {strategy.name: strategy for strategy in _kept()}
"""By name: the fourteen that the paper keeps."""

PAPER = ("NII", "NIG", "NGG", "III", "IIG", "IGG", "ING", "GGG")
"""Those that the paper ran (section 4)."""


def strategy_of(name: str) -> Strategy:
    """A strategy by its three letters.

    Raises:
        ConfigError: there is none, or it is one of those that the paper drops.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    reason = ""
    if len(name) == 3 and set(name) <= {*Granularity}:
        reason = ": optimiser states coarser than parameters or gradients cost memory and save no communication"
    raise ConfigError(f"sharding strategy '{name}' was given{reason}; choose one of {', '.join(STRATEGIES)}.")
