"""`fedsign explain` knows every section, setting and component, and comments do not change a configuration."""

from pathlib import Path

import pytest

from fedsign.config import ExperimentConfig, from_dict, from_toml
from fedsign.errors import ConfigError
from fedsign.registry import KINDS
from fedsign.sections import Part, tables
from simulations.explain import commented, explain, own_settings, settings_of, settings_rows

OWN = """
from typing import Annotated

from pydantic import Field

from strategies.fedavg import FedAvg


class Own(FedAvg):
    "Mine."

    def __init__(self, *, temper: Annotated[float, Field(gt=0, le=2)] = 1.5) -> None:
        super().__init__()
"""


def test_every_section_and_its_settings_are_explained() -> None:
    for path, table in tables(ExperimentConfig):
        (section,) = explain(path)
        assert [row["key"] for row in section.settings] == [*own_settings(table)]
        for key in own_settings(table):
            (row,) = explain(f"{path}.{key}")[0].settings
            assert row["key"] == key and row["what"] != "-"


@pytest.mark.parametrize("kind", KINDS)
def test_every_component_is_explained_where_it_is_named(kind: str) -> None:
    places = [path for path, table in tables(ExperimentConfig) if issubclass(table, Part) and table.kind == kind]
    for name, (_, text) in KINDS[kind].table.items():
        (found,) = explain(f"{(places or [kind])[0]}.{name}")
        assert (found.text, found.settings) == (text, settings_rows(kind, name))
        assert [row["key"] for row in found.settings] == [*settings_of(kind, name)]


def test_a_setting_has_its_type_range_and_default() -> None:
    (found,) = explain("strategy.fedsign.gamma")
    assert found.settings == [
        {"key": "gamma", "type": "number at least 0", "default": "0.0003", "what": "strength γ of the sign term"}
    ]
    (momentum,) = explain("client.optimizer.sgd.momentum")[0].settings
    assert momentum["type"] == "number at least 0 and below 1"
    assert explain("rounds")[0].settings == explain("experiment.rounds")[0].settings


def test_a_setting_of_several_components_is_explained_for_each() -> None:
    assert [each.title for each in explain("strategy.mu")] == ['strategy.name = "fedprox"', 'strategy.name = "moon"']


def test_a_component_of_the_users_own_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explained.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = explain("strategy.explained:Own")
    assert (found.text, found.settings) == (
        "Mine.",
        [{"key": "temper", "type": "number above 0 and at most 2", "default": "1.5", "what": "-"}],
    )


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("client.lrr", "client.lr"),
        ("learning_rate", "client.lr"),
        ("fedsing", "strategy.fedsign"),
        ("??", "fedsign explain"),
    ],
)
def test_what_does_not_exist_is_a_sentence_with_the_nearest(path: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"is no section, setting or component.*'{hint}'"):
        explain(path)


@pytest.mark.parametrize("strategy", ["fedsign", "moon"])
def test_comments_do_not_change_a_configuration(strategy: str) -> None:
    config = from_dict({"strategy": {"name": strategy}, "results": {"root": "#"}})
    text = commented(config)
    assert from_toml(text) == config
    assert "lr = 0.05  # clients' learning rate, η" in text.splitlines()
    keys = [line for line in text.splitlines() if " = " in line]
    assert sum("  # " in line for line in keys) == len(keys)


def test_settings_without_a_default_are_commented_out() -> None:
    config = from_dict({"data": {"name": "csv", "path": "x.csv", "target": "y"}, "partition": {"name": "iid"}})
    text = commented(config)
    assert from_toml(text) == config
    section = text[text.index("[data]") : text.index("[partition]")].splitlines()
    (line,) = [line for line in section if line.startswith("# owner =")]
    assert line.endswith("; text, none by default")
    (given,) = [
        line for line in commented(from_toml(text.replace("# owner =", 'owner = "z"'))).splitlines() if "owner" in line
    ]
    assert given.startswith('owner = "z"  # ')
