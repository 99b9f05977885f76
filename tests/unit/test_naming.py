"""A run is named after its data and its strategy, unless its configuration gives a name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fedsign.config import from_dict, from_toml
from fedsign.errors import ConfigError
from fedsign.naming import data_file, data_label, run_name
from fedsign.sections import FileName
from fedsign.storage.finding import find_runs
from simulations import run
from simulations.jobs import digest_of


def named(strategy: str = "fedavg", **data: Any) -> str:
    return run_name({"data": data, "strategy": {"name": strategy}})


def test_a_run_is_named_after_its_file_or_its_data_set_and_its_strategy() -> None:
    assert from_dict({}).run_name == "digits-fedavg"
    assert named(name="mnist", root="/srv/data") == "mnist-fedavg"
    assert named("anchored:Anchored", name="spirals:spirals", path="x.npz") == "spirals-Anchored"
    assert from_dict({"name": "mine"}).run_name == "mine"
    assert from_dict({"strategy": {"name": "fedavg"}}).project_name == "digits"


@pytest.mark.needs("tables", "images")
def test_a_data_set_of_the_users_own_is_named_after_its_file_or_folder() -> None:
    assert named(name="csv", path="~/data/wine.csv") == "wine-fedavg"
    assert named(name="image_folder", root="/srv/my pictures/") == "my-pictures-fedavg"
    assert named(name="npz", path="数据.npz") == "npz-fedavg", "no letter of it can stand in a name"
    assert named(name="image_folder", root=".") == "image_folder-fedavg"
    assert data_file({"data": {"name": "csv", "path": "a/wine.csv"}}) == "a/wine.csv"
    assert data_label({"data": {"name": "npz", "path": "arrays/wine.npz"}}) == "wine.npz"
    assert data_file({"data": {"name": "digits", "path": "a/wine.csv"}}) == ""


@pytest.mark.needs("tables")
@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(max_size=200))
def test_a_derived_name_is_the_name_of_a_folder_whatever_the_file_is_called(path: str, strategy: str) -> None:
    name = named(strategy, name="npz", path=path)
    assert TypeAdapter(FileName).validate_python(name) == name


def test_a_name_that_is_given_has_to_be_one_of_a_folder() -> None:
    with pytest.raises(ConfigError, match="a name for a folder"):
        from_dict({"name": "../up"})


def test_the_name_follows_the_strategy_and_does_not_change_the_digest() -> None:
    default = from_dict({})
    assert default.replace(**{"strategy.name": "feddyn"}).run_name == "digits-feddyn"
    assert from_toml(default.to_toml()).run_name == default.run_name
    assert digest_of(default) == digest_of(default.replace(name="fedsign-digits"))


def test_runs_of_all_names_are_listed_by_their_time(tmp_path: Path) -> None:
    for place in ("b-fedavg/20260101-000000-seed0", "a-fedavg/20260102-000000-seed0", "c/20250101-000000-seed0"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.toml").touch()
    assert [run.path.name[:8] for run in find_runs(tmp_path)] == ["20250101", "20260101", "20260102"]


def test_a_run_that_was_named_by_the_former_default_is_resumed_under_its_name(tiny: dict[str, Any]) -> None:
    first = run({**tiny, "name": "fedsign-digits"})
    assert first.path.parent.name == "fedsign-digits"
    resumed = run(from_dict({**tiny, "rounds": 3}), resume=first.path)
    assert resumed.config.name == "fedsign-digits" and len(resumed.rounds) == 3
