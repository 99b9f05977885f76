"""Every row of every table can be resolved, and says what it is."""

import inspect

import pytest

from fedsign import plugins
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


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_lower_case_words(kind: str) -> None:
    for name in KINDS[kind].table:
        assert name.isidentifier() and name == name.lower()


@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_a_rows_settings_are_named_as_its_parameters(kind: str, name: str) -> None:
    parameters = inspect.signature(resolve(kind, name)).parameters
    assert plugins.names_of(kind, name) == list(parameters)[KINDS[kind].num_given :]
