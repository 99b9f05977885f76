"""The request of a comparison, and the scope of each key that a user gives.

A key may be limited to one strategy, as in "fedprox:strategy.mu". Otherwise a key `strategy.X` applies to the compared
strategies that have a setting X.

Conditions are the keys of `by`, and those keys of `grid` that are no hyperparameters: papers vary the amount of
training and the number of clients (`ABLATIONS`); they do not tune them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsign import plugins
from fedsign.comparison.summary import products
from fedsign.errors import ConfigError
from fedsign.overrides import parse_override
from fedsign.registry import resolve

STRATEGIES = ("fedavg", "fedprox", "feddyn", "fedsign")
NUM_SEEDS = 5
ABLATIONS = ("server.cohort_size", "client.local_epochs", "client.local_steps", "client.batch_size")
CHOICES = ("strategy", "client", "server")
"""Sections whose keys are hyperparameters, except for `ABLATIONS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The user's request. Keys of `grid` and `settings` may be limited to a strategy: "fedprox:strategy.mu".

    All keys of `by` are conditions.
    """

    strategies: Sequence[str] = STRATEGIES
    seeds: Sequence[int] = ()
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    by: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    validation_fraction: float | None = None
    trials: int = 0  # per search of a strategy's settings; 0: no search
    tuning_seeds: Sequence[int] = ()
    search: Mapping[str, str] = field(default_factory=dict)  # key -> range
    tuning_settings: Mapping[str, Any] = field(default_factory=dict)  # of trials, in place of conditions

    def choices(self, strategy: str) -> list[dict[str, Any]]:
        """Return all combinations of hyperparameters to try for a strategy."""
        axes = {key: values for key, values in self.grid.items() if is_choice(key)}
        return products(own_values(axes, strategy))

    @property
    def condition_axes(self) -> dict[str, Sequence[Any]]:
        """Return the keys that form conditions, with their values."""
        return {**{key: values for key, values in self.grid.items() if not is_choice(key)}, **self.by}


def parse_axis(text: str, *, option: str = "--grid") -> tuple[str, list[Any]]:
    """Parse `key=value,value,...`; each value is parsed as in `--set`.

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
    # as one TOML list first: commas inside of brackets or quotes do not separate values
    _, parsed = parse_override(f"grid=[{values}]")
    if isinstance(parsed, str):  # not a TOML list, but words without quotes
        parsed = [parse_override(f"grid={part}")[1] for part in values.split(",")]
    return key.strip(), parsed


def own_values(keyed: Mapping[str, Any], strategy: str) -> dict[str, Any]:
    """Return what applies to a strategy, under plain keys; a key given for it alone overrides the general one."""
    values: dict[str, Any] = {}
    scoped = {}
    for given, value in keyed.items():
        scope, key = scope_of(given)
        if scope == strategy:
            scoped[key] = value
        elif scope is None and (not key.startswith("strategy.") or has_setting(strategy, key.partition(".")[2])):
            values[key] = value
    # whatever the order on the command line
    return values | scoped


def scope_of(given: str) -> tuple[str | None, str]:
    """Split a key into its strategy and the plain key; the name of a strategy may contain a colon."""
    scope, separator, key = given.rpartition(":")
    return (scope if separator else None), key


def is_choice(given: str) -> bool:
    """Whether a key is a hyperparameter; keys limited to a strategy always are, as conditions apply to all."""
    scope, key = scope_of(given)
    return scope is not None or (key.partition(".")[0] in CHOICES and key not in ABLATIONS)


def has_setting(strategy: str, setting: str) -> bool:
    """Whether a strategy's factory takes a setting."""
    model = plugins.settings_model("strategy", strategy, resolve("strategy", strategy))
    name = setting.partition(".")[0]
    return name in plugins.names_of("strategy", strategy) or model.model_config.get("extra") == "allow"
