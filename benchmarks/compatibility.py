"""Compatibility tables of docs/capabilities.md and lists of docs/capabilities/*.md, computed by asking the rules.

Nothing is trained here: each cell's experiment is checked as before its first round.
tests/contract/test_capabilities.py runs them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from clients.trainer import check_training
from fedsign import plugins
from fedsign.capabilities import CAPABILITIES
from fedsign.capability import Capability
from fedsign.compatibility import RULES, Chosen, Unless
from fedsign.config import RULES as CONFIG_RULES
from fedsign.config import from_dict
from fedsign.data.checks import RULES as FIT_RULES
from fedsign.errors import FedSignError
from fedsign.extensions import load
from fedsign.records import ObjectiveSpec
from fedsign.registry import KINDS, resolve
from fedsign.rules import Choice, Rule
from fedsign.workload import Workload
from simulations.rounds import make_strategy
from strategies.base import Strategy

NUM_CLIENTS = 3  # the minimum for Krum and Bulyan
AnyRule = Rule[Any] | Choice[Any]


def without_linear(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """Make a model without linear layers."""
    return nn.Sequential(nn.Unflatten(1, (1, 64)), nn.Conv1d(1, num_outputs, 64), nn.Flatten())


def columns() -> dict[str, Mapping[str, Any]]:
    """Return what an experiment may add to its strategy -> the settings."""
    settings: dict[str, Mapping[str, Any]] = {
        "weighting": {"strategy": {"weighting": "examples"}},
        "BatchNorm": {"model": {"name": "cnn", "channels": [2, 2]}},
        "no linear layer": {"model": {"name": f"{__name__}:without_linear"}},
        "cohort of one": {"server": {"cohort_size": 1}},
        "server optimizer": {"server": {"optimizer": {"name": "adam"}}},
        "AdamW": {"client": {"lr": 0.001, "optimizer": {"name": "adamw"}}},
        "a rate per step": {"client": {"schedule": {"name": "cosine", "per": "step"}}},
        "micro-batches": {"client": {"micro_batch": 4}},
    }
    return {**settings, **{name: example for row in CAPABILITIES.values() for name, example in row.examples.items()}}


def strategy(name: str, **settings: Any) -> dict[str, Any]:
    """Return a strategy with defaults; settings without one get a small number."""
    model = plugins.settings_model("strategy", name, resolve("strategy", name))
    required = {str(field.alias): 0.05 for field in model.model_fields.values() if field.is_required()}
    return {"name": name, **required, **settings}


def tree(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment: two rounds of three steps, with clients of different sizes."""
    found: dict[str, Any] = {
        "rounds": 2,
        "callbacks": [],
        "partition": {"num_clients": NUM_CLIENTS, "alpha": 1.0},
        "server": {"cohort_size": NUM_CLIENTS},
        "client": {"local_steps": 3},
        "model": {"name": "mlp", "hidden": [8]},
        "strategy": strategy(name),
    }
    for section, change in changes.items():
        is_whole = not isinstance(change, Mapping) or "name" in change
        found[section] = change if is_whole else {**found.get(section, {}), **change}
    return found


def refusal(experiment: Mapping[str, Any]) -> str:
    """Return the error that rejects an experiment before its first round; empty if there is none."""
    try:
        workload = Workload(from_dict(experiment))
        strategy = make_strategy(workload)
        spec = strategy.objective(1) if isinstance(strategy, Strategy) else ObjectiveSpec()
        check_training(workload, spec, strategy)
    except FedSignError as error:
        return str(error)
    return ""


@cache
def cells() -> dict[tuple[str, str], str]:
    """Return (strategy, column) -> the reason for rejection."""
    named = columns()
    return {
        (name, column): refusal(tree(name, changes))
        for name in KINDS["strategy"].table
        for column, changes in named.items()
    }


def page() -> list[str]:
    """Return the generated part of docs/capabilities.md."""
    named, strategies = columns(), list(KINDS["strategy"].table)
    rows = [[f"`{name}`", *("-" if cells()[name, column] else "yes" for column in named)] for name in strategies]
    travels = [[f"`{name}`", *map(str, traffic(name))] for name in strategies]
    return [
        *("## Strategies", ""),
        *_table(["strategy", *named], rows),
        *("", "What a column asks for:", ""),
        *(f"- **{name}**: {_settings(settings)}" for name, settings in named.items()),
        *("", "## What is refused", "", "Those of a capability stand on [its page](README.md#capabilities).", ""),
        *refused_by([*CONFIG_RULES, *FIT_RULES, *RULES]),
        *("", "## What clients keep and what travels", ""),
        (
            "In models: the size of the parameters, to which the buffers come once, as for FedAvg. *Down* is a "
            "request from the second round on."
        ),
        "",
        *_table(["strategy", "kept at a client", "down", "up"], travels),
    ]


def traffic(name: str) -> tuple[int, int, int]:
    """Return what is stored, sent down and sent up, as declared by strategy and objective."""
    strategy = make_strategy(Workload(from_dict(tree(name, {}))))
    if not isinstance(strategy, Strategy):
        return 0, 1, 1
    spec = strategy.objective(1)
    objective = plugins.build("objective", spec.name, spec.settings)
    shares = type(strategy).shared is not Strategy.shared
    return int(objective.has_state), 1 + shares, 1 + objective.replies_with_more


def refused_by(rules: Iterable[AnyRule]) -> Iterator[str]:
    """Yield a line per combination that rules reject, with the options of a choice below it."""
    for each in rules:
        if isinstance(each, Rule):
            yield f"- {_line(each)}"
        elif not each.given:
            yield from refused_by(each.all_rules)
        else:
            yield (
                f"- {str(Rule(each.made, each.given)).removesuffix(', but')} ({each.remedy})".removesuffix(" ()") + ":"
            )
            yield from (f"  - {_line(rule)}" for rule in each.all_rules)


def rules_of(row: Capability) -> list[AnyRule]:
    """Return a capability's rules: of the extension point, its tables, and its registered components."""
    found = [*load(row.extends["rules"])] if "rules" in row.extends else []
    tables = [load(target) for target in row.sections.values()]
    things = [load(target) for rows in row.rows.values() for target, _ in rows.values()]
    for declared in (*tables, *things):
        found += getattr(declared, "rules", ())
    return found


def _line(rule: Rule[Any]) -> str:
    match rule.when:
        case Unless(path=path, allowed=allowed):
            found = f"{path} other than {' or '.join(map(str, allowed))}"
            return str(replace(rule, sentence=rule.sentence.replace("{found}", found)))
        case Chosen(section=section):
            return str(replace(rule, sentence=rule.sentence.replace("{found}", f"{section}.name=...")))
        case when if when.__doc__ and "{found" in rule.sentence:
            return str(replace(rule, sentence=when.__doc__[0].lower() + when.__doc__[1:].rstrip(".")))
    return str(rule)


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in _leaves(settings))


def _leaves(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
