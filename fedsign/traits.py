"""Traits: what a component declares about itself, for compatibility rules to read.

A class or factory declares a trait by an attribute of that name.  The default applies to components that declare
nothing, such as a user's own or Flower's.  It is the safe choice: rather a combination refused than a wrong result.

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
    """The traits of a component, read by name or off an object."""

    kind: ClassVar[str]

    @classmethod
    def of(cls, thing: Any) -> Self:
        """The traits of a name or an object; for a class, only those that do not depend on its settings."""
        declared = resolve(cls.kind, thing) if isinstance(thing, str) else thing
        values = {field.name: getattr(declared, field.name, field.default) for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if not isinstance(value, property)})

    @classmethod
    def having(cls, **values: Any) -> list[str]:
        """Registered names whose traits have these values."""
        known = {name: cls.of(name) for name in KINDS[cls.kind].table}
        return [
            name
            for name, traits in known.items()
            if all(getattr(traits, key) == value for key, value in values.items())
        ]


@dataclass(frozen=True, kw_only=True)
class DatasetTraits(Traits):
    """What is known of a data set before it is read."""

    kind = "dataset"
    frame: Any = None  # settings -> fedsign.data.base.Frame


@dataclass(frozen=True, kw_only=True)
class EngineTraits(Traits):
    """Where clients train."""

    kind = "engine"
    trains_here: bool = False  # in this process or its child processes
    is_deployed: bool = False  # on remote nodes, which may read local data
    keeps_processes: bool = False  # a client may have processes that outlive a round


@dataclass(frozen=True, kw_only=True)
class MetricTraits(Traits):
    """What a metric expects."""

    kind = "metric"
    targets: str = ""  # a kind of fedsign.data.target, such as class labels, real targets or text; empty: unknown
    inputs: Any = None  # fedsign.metrics.base.MetricInputs, for arguments other than outputs and targets


@dataclass(frozen=True, kw_only=True)
class ObjectiveTraits(Traits):
    """What clients minimize."""

    kind = "objective"
    has_state: bool = False  # the client keeps tensors between its rounds
    contrasts: bool = False  # reads the input of the classifier
    contrast_is_mean: bool = False  # the contrast of a batch is the mean of those of its samples
    needs_unit_displacement: bool = False  # reads the displacement of a constant unit gradient
    adds_up: bool = False  # penalty and state are computed element by element


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits(Traits):
    """How the clients' optimizer treats the model."""

    kind = "optimizer"
    takes_model: bool = False  # receives the module instead of its parameters
    takes_groups: bool = False  # receives the module, and supports parameter groups
    trains_part: bool = False  # trains and sends a part of the model at a time
    adapt_model: Any = None  # modifies a new model: adapters

    @property
    def takes_rates(self) -> bool:
        """Whether parameters may have individual learning rates."""
        return self.takes_groups if self.takes_model else self.adapt_model is None


@dataclass(frozen=True, kw_only=True)
class PartitionTraits(Traits):
    """Who holds the data."""

    kind = "partition"
    client_data: Any = None  # a reader of data that clients hold themselves; nothing is partitioned
    is_even: bool = False  # all clients are meant to have equally many samples of the same distribution


@dataclass(frozen=True, kw_only=True)
class StrategyTraits(Traits):
    """How the server treats replies."""

    kind = "strategy"
    proposes_update: bool = False  # has `server_update`, whose proposal a server optimizer or privacy may change
    takes_parts: bool = False  # accepts replies that hold a part of the model
    own_aggregation: str = ""  # the method with which a subclass aggregates raw replies
    own_update: str = ""  # the method with which a subclass changes the mean
    weights_replies: bool = False  # replies may have unequal weights
    weights: tuple[float, ...] = ()  # per client
    # setting -> search range, such as {"mu": "1e-4..1:log"}; "x0.1..x10:log" is relative to the experiment's value
    search_space: Mapping[str, str] | None = None
    # a strategy that this one contains -> the own settings at which it nearly is that one: FedProx with mu -> 0 is
    # FedAvg, {"fedavg": {"mu": 1e-4}}.  A search tries them with that strategy's best settings.
    special_case: Mapping[str, Mapping[str, float]] | None = None


@dataclass(frozen=True, kw_only=True)
class TaskTraits(Traits):
    """What a task learns."""

    kind = "task"
    targets: str = ""  # a kind of fedsign.data.target, such as class labels, real targets or text; empty: unknown


TRAITS: Mapping[str, type[Traits]] = {each.kind: each for each in Traits.__subclasses__()}


def traits_shown(kind: str, name: str) -> dict[str, Any]:
    """What `fedsign list` shows of a component: its source, its traits with defaults, and its rules."""
    thing, traits = resolve(kind, name), TRAITS.get(kind)
    shown: dict[str, Any] = {"defined in": target_of(kind, name)}
    for field in fields(traits) if traits is not None else ():
        value = getattr(thing, field.name, field.default)
        if isinstance(value, property):
            value = "by its settings"
        if isinstance(value, Mapping):
            value = ", ".join(f"{key}={each}" for key, each in value.items())
        shown[field.name] = value if isinstance(value, str) else bool(value)
    return shown | {f"rule {number}": str(rule) for number, rule in enumerate(rules_of(kind, name), start=1)}


def declares(**traits: Any) -> Callable[[FactoryT], FactoryT]:
    """Decorator that sets traits on a function; classes use attributes."""

    def mark(factory: FactoryT) -> FactoryT:
        vars(factory).update(traits)
        return factory

    return mark


def rules_of(kind: str, name: str) -> tuple[Rule[Any], ...]:
    """The rules that a component declares as `rules`."""
    rules: tuple[Rule[Any], ...] = getattr(resolve(kind, name), "rules", ())
    return rules
