"""What a comparison is asked for, and what each key that a user gives applies to.

A key may be given for one strategy alone, as "fedprox:strategy.mu".  Without a strategy, a key `strategy.X` is for
those of the strategies that have a setting X.

Conditions are the keys of `by`, and those keys of `grid` that are no hyper-parameters: how much is trained and by how
many (`ABLATIONS`) is what papers vary, not what they tune.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsign import plugins
from fedsign.comparison.summary import products
from fedsign.config import parse_override
from fedsign.errors import ConfigError
from fedsign.registry import resolve

STRATEGIES = ("fedavg", "fedprox", "feddyn", "fedsign")
NUM_SEEDS = 5
ABLATIONS = ("server.cohort_size", "client.local_epochs", "client.local_steps", "client.batch_size")
CHOICES = ("strategy", "client", "server")
"""Sections whose keys are hyper-parameters, but for `ABLATIONS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a user asks for.  Keys of `grid` and `settings` may begin with a strategy: "fedprox:strategy.mu".

    Keys of `by` are conditions, whatever they are.
    """

    strategies: Sequence[str] = STRATEGIES
    seeds: Sequence[int] = ()
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    by: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    validation_fraction: float | None = None
    trials: int = 0  # of the search of each strategy's settings; 0: none
    tuning_seeds: Sequence[int] = ()
    search: Mapping[str, str] = field(default_factory=dict)  # key -> range
    tuning_settings: Mapping[str, Any] = field(default_factory=dict)  # of the trials, in the place of conditions

    def choices(self, strategy: str) -> list[dict[str, Any]]:
        """All combinations of hyper-parameters to try for one strategy."""
        axes = {key: values for key, values in self.grid.items() if is_choice(key)}
        return products(own_values(axes, strategy))

    @property
    def condition_axes(self) -> dict[str, Sequence[Any]]:
        """The keys that conditions are made of, with their values."""
        return {**{key: values for key, values in self.grid.items() if not is_choice(key)}, **self.by}


def parse_axis(text: str, *, option: str = "--grid") -> tuple[str, list[Any]]:
    """`key=value,value,...` as given to an option, each value as in `--set`.

    >>> parse_axis("strategy.gamma=0.001,0.01"), parse_axis("model.hidden=[64],[64, 64]")
    (('strategy.gamma', [0.001, 0.01]), ('model.hidden', [[64], [64, 64]]))
    >>> parse_axis("model.name=mlp,cnn")
    ('model.name', ['mlp', 'cnn'])
    """
    key, separator, values = text.partition("=")
    if not separator or not all(key.strip().split(".")) or not all(part.strip() for part in values.split(",")):
        raise ConfigError(
            f"{option} takes KEY=VALUE,VALUE,..., such as {option} partition.alpha=10,1,0.5; '{text}' was given."
        )
    _, parsed = parse_override(f"grid=[{values}]")
    if isinstance(parsed, str):  # no TOML list: words without quotes
        parsed = [parse_override(f"grid={part}")[1] for part in values.split(",")]
    return key.strip(), parsed


def own_values(keyed: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """What applies to one strategy, under plain keys; what is given for it alone wins, at the place of the other."""
    found: dict[str, Any] = {}
    scoped = {}
    for given, value in keyed.items():
        scope, key = scope_of(given)
        if scope == strategy:
            scoped[key] = value
        elif scope is None and (not key.startswith("strategy.") or has_setting(strategy, key.partition(".")[2])):
            found[key] = value
    return found | scoped


def scope_of(given: str) -> tuple[str | None, str]:
    """The strategy that a key is for, and the plain key; a strategy's name may have a colon of its own."""
    scope, separator, key = given.rpartition(":")
    return (scope if separator else None), key


def is_choice(given: str) -> bool:
    """What is given for one strategy alone cannot be a condition."""
    scope, key = scope_of(given)
    return scope is not None or (key.partition(".")[0] in CHOICES and key not in ABLATIONS)


def has_setting(strategy: str, setting: str) -> bool:
    """Whether a strategy's factory takes a setting."""
    model = plugins.settings_model("strategy", strategy, resolve("strategy", strategy))
    name = setting.partition(".")[0]
    return name in plugins.names_of("strategy", strategy) or model.model_config.get("extra") == "allow"
