"""What of a stored configuration differs from the defaults."""

import tomllib
from typing import Any

import pytest

from fedsign.config import ExperimentConfig, from_dict
from fedsign.errors import ConfigError
from fedsign.registry import KINDS
from fedsign.report.differences import Difference, differences
from fedsign.sections import Part, tables

COMPONENTS = [
    (path, name)
    for path, table in tables(ExperimentConfig)
    if issubclass(table, Part)
    for name in KINDS[table.kind].table
]


def stored(**tree: Any) -> dict[str, Any]:
    """A configuration as config.toml holds it."""
    return tomllib.loads(from_dict(tree).to_toml())


def paths(config: dict[str, Any]) -> list[str]:
    return [each.path for each in differences(config)]


def test_the_default_experiment_has_none() -> None:
    assert differences(stored()) == []


@pytest.mark.parametrize(("place", "name"), COMPONENTS)
def test_what_a_component_brings_along_is_no_difference_beside_its_name(place: str, name: str) -> None:
    tree: dict[str, Any] = {"name": name}
    for key in reversed(place.split(".")):
        tree = {key: tree}
    try:
        config = stored(**tree)
    except ConfigError:
        pytest.skip("it does not run with its defaults in the default experiment")
    assert {*paths(config)} <= {f"{place}.name"}


def test_values_are_compared_at_any_depth() -> None:
    config = stored(rounds=7, client={"lr": 0.1, "optimizer": {"momentum": 0.5}}, model={"hidden": [8]})
    assert differences(config) == [
        Difference(path="rounds", value=7, default=40),
        Difference(path="model.hidden", value=[8], default=[128, 128]),
        Difference(path="client.lr", value=0.1, default=0.05),
        Difference(path="client.optimizer.momentum", value=0.5, default=0.9),
    ]


def test_what_this_version_does_not_know_is_a_difference_without_a_default() -> None:
    config = {
        "strategy": {"name": "mine:Own", "strength": 2},
        "model": {"name": "mlp", "later": True},
        "of_later": {"key": 1, "inner": {"list": [1]}},
        "loose": "text",
    }
    assert differences(config) == [
        Difference(path="strategy.name", value="mine:Own", default="fedsign"),
        Difference(path="strategy.strength", value=2),
        Difference(path="model.later", value=True),
        Difference(path="of_later.key", value=1),
        Difference(path="of_later.inner.list", value=[1]),
        Difference(path="loose", value="text"),
    ]


def test_former_names_of_keys_are_no_difference() -> None:
    assert differences({"data": {"normalise": "default"}, "parameterisation": {"name": "none"}}) == []


def test_a_section_that_is_a_value_and_a_value_that_is_a_table_are_differences() -> None:
    assert paths({"client": 3, "rounds": {"a": 1}}) == ["client", "rounds"]
