"""Every row of every table can be resolved and has a description."""

import importlib.util
import inspect
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from fedsign import capabilities, plugins, registry
from fedsign.capabilities import CAPABILITIES
from fedsign.errors import ConfigError
from fedsign.registry import KINDS, resolve

ROWS = [(kind, name) for kind, entry in KINDS.items() for name in entry.table]


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_row_can_be_resolved_and_described(kind: str, name: str) -> None:
    assert callable(resolve(kind, name))
    assert KINDS[kind].table[name][1]


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_rows_settings_have_types_and_round_trip_through_toml(kind: str, name: str) -> None:
    model = plugins.settings_model(kind, name, resolve(kind, name))
    needed = [field for field in model.model_fields.values() if field.is_required()]
    required = {field.alias: 1 if field.annotation is int else 0.5 for field in needed}
    settings = plugins.complete(kind, name, required, section=kind)
    assert plugins.complete(kind, name, settings, section=kind) == settings


def test_names_of_all_capabilities_are_known_where_they_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    known = tomllib.loads(Path(capabilities.__file__).with_name("known.toml").read_text(encoding="utf-8"))["names"]
    rows = {
        name: {kind: [*rows] for kind, rows in each.rows.items()} for name, each in CAPABILITIES.items() if each.rows
    }
    assert {name: known.get(name) for name in rows} == rows
    monkeypatch.setattr(registry, "absent", lambda _: {"krums": {"strategy": ["krum_of_1998"]}})
    with pytest.raises(ConfigError, match="strategy 'krum_of_1998' was given, but needs the capability 'krums'"):
        registry.target_of("strategy", "krum_of_1998")


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_lower_case_words(kind: str) -> None:
    for name in KINDS[kind].table:
        assert name.isidentifier() and name == name.lower()


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_rows_settings_are_named_as_its_parameters(kind: str, name: str) -> None:
    parameters = [*inspect.signature(resolve(kind, name)).parameters.values()][KINDS[kind].num_given :]
    settings = [each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY]
    assert plugins.names_of(kind, name) == settings


@pytest.mark.parametrize(
    ("old", "row"),
    [
        pytest.param(old, row, marks=pytest.mark.needs(owner))
        for owner, old, row in (
            ("images", "fedsign.data.mnist:mnist", ("dataset", "mnist")),
            ("language", "fedsign.data.jsonl:jsonl", ("dataset", "jsonl")),
            ("sparsity", "fedsign.optim.packed:packed_adamw", ("optimizer", "packed_adamw")),
            ("robustness", "clients.attack:sign_flip", ("attack", "sign_flip")),
        )
    ],
)
def test_the_old_name_of_a_module_that_has_moved_is_read_with_a_warning(
    old: str, row: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    kind, name = row
    assert resolve(kind, old) is resolve(kind, name)
    (said,) = caplog.messages
    assert f"module {old.partition(':')[0]} is now" in said


def test_every_module_that_has_moved_is_where_it_is_said_to_be() -> None:
    for old, new in registry._MOVED.items():
        assert importlib.util.find_spec(new) is not None, new
        assert old not in sys.modules


def test_no_two_capabilities_claim_the_same_name() -> None:
    """The later one would win, in silence."""
    claimed = Counter(
        (what, name)
        for row in CAPABILITIES.values()
        for what, names in {"command": row.commands, "Python": row.api, "column": row.columns, **row.rows}.items()
        for name in names
    )
    assert [claim for claim, num in claimed.items() if num > 1] == []
