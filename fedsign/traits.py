"""Traits: what a registered thing declares about itself, so that rules can judge what it goes with.

A class or factory declares a trait by an attribute of that name.  The default holds for whatever declares nothing, such
as a class of a user's own or one of Flower's, and is the safe one: a combination is then refused rather than wrong.

>>> StrategyTraits.of("fedavg").takes_parts, StrategyTraits.of("scaffold").takes_parts
(True, False)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

from fedsign.registry import KINDS, resolve, target_of
from fedsign.rules import Rule

FactoryT = TypeVar("FactoryT", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Read off whatever is registered under a name, or off an object made of it."""

    kind: ClassVar[str]

    @classmethod
    def of(cls, thing: Any) -> Self:
        """The traits of a name, or of an object; of a class, those that do not depend on its settings."""
        declared = resolve(cls.kind, thing) if isinstance(thing, str) else thing
        found = {field.name: getattr(declared, field.name, field.default) for field in fields(cls)}
        return cls(**{name: value for name, value in found.items() if not isinstance(value, property)})

    @classmethod
    def having(cls, **values: Any) -> list[str]:
        """The names in the registry whose traits have these values."""
        known = {name: cls.of(name) for name in KINDS[cls.kind].table}
        return [name for name, its in known.items() if all(getattr(its, key) == value for key, value in values.items())]


@dataclass(frozen=True, kw_only=True)
class DatasetTraits(Traits):
    """What a reader says of its data without reading them."""

    kind = "dataset"
    frame: Any = None  # settings -> fedsign.data.base.Frame


@dataclass(frozen=True, kw_only=True)
class EngineTraits(Traits):
    """Where clients train."""

    kind = "engine"
    trains_here: bool = False  # in this process, or in processes that it starts
    is_deployed: bool = False  # at nodes that are machines of their own and may read data of their own
    keeps_processes: bool = False  # a client may have processes that outlive a round


@dataclass(frozen=True, kw_only=True)
class MetricTraits(Traits):
    """What a metric is of."""

    kind = "metric"
    targets: str = ""  # class labels, real targets or text; empty: not known


@dataclass(frozen=True, kw_only=True)
class ObjectiveTraits(Traits):
    """What clients minimize."""

    kind = "objective"
    has_state: bool = False  # a client keeps tensors from one of its rounds to the next
    contrasts: bool = False  # looks at what enters the classifier
    contrast_is_mean: bool = False  # of its samples' contrasts, each as if it were a batch
    needs_unit_displacement: bool = False  # reads how far a constant gradient would have moved a client
    adds_up: bool = False  # its penalty is a sum over elements


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits(Traits):
    """How the clients' optimizer treats the model."""

    kind = "optimizer"
    takes_model: bool = False  # is given the module in place of its parameters
    takes_groups: bool = False  # given the module, its group of parameters may be divided
    trains_part: bool = False  # trains, and sends, a part of the model at a time
    adapt_model: Any = None  # changes the model when it is made: adapters

    @property
    def takes_rates(self) -> bool:
        """Whether parameters may have learning rates of their own."""
        return self.takes_groups if self.takes_model else self.adapt_model is None


@dataclass(frozen=True, kw_only=True)
class PartitionTraits(Traits):
    """Whose the data are."""

    kind = "partition"
    client_data: Any = None  # reads what clients hold themselves; nothing is dealt out


@dataclass(frozen=True, kw_only=True)
class StrategyTraits(Traits):
    """How the server treats replies."""

    kind = "strategy"
    takes_target: bool = False  # says where to go (`move`); a server optimizer or privacy may stand in between
    takes_parts: bool = False  # can do with replies that hold a part of the model
    own_aggregation: str = ""  # the method by which a subclass takes the replies as they are
    weights_replies: bool = False  # one may count for more than another
    weights: tuple[float, ...] = ()  # of clients in their order
    # setting -> where a search looks, such as {"mu": "1e-4..1:log"}; "x0.1..x10:log" is relative to the experiment's
    search_space: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class TaskTraits(Traits):
    """What a task learns."""

    kind = "task"
    targets: str = ""  # class labels, real targets or text; empty: not known


TRAITS: Mapping[str, type[Traits]] = {each.kind: each for each in Traits.__subclasses__()}


def traits_shown(kind: str, name: str) -> dict[str, Any]:
    """Where a registered thing, or one of a user's own, is; its traits, declared or by default; and its rules."""
    thing, traits = resolve(kind, name), TRAITS.get(kind)
    found: dict[str, Any] = {"defined in": target_of(kind, name)}
    for field in fields(traits) if traits is not None else ():
        value = getattr(thing, field.name, field.default)
        if isinstance(value, property):
            value = "by its settings"
        if isinstance(value, Mapping):
            value = ", ".join(f"{key}={each}" for key, each in value.items())
        found[field.name] = value if isinstance(value, str) else bool(value)
    return found | {f"rule {place}": str(rule) for place, rule in enumerate(rules_of(kind, name), start=1)}


def declares(**traits: Any) -> Callable[[FactoryT], FactoryT]:
    """Decorates a function with its traits; a class has them as attributes."""

    def mark(factory: FactoryT) -> FactoryT:
        vars(factory).update(traits)
        return factory

    return mark


def rules_of(kind: str, name: str) -> tuple[Rule[Any], ...]:
    """The rules that a registered thing declares as `rules`: configurations in which it cannot be used."""
    rules: tuple[Rule[Any], ...] = getattr(resolve(kind, name), "rules", ())
    return rules
