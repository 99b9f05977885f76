"""Every name that was changed works under its former name, with one sentence that says the new one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedsign import former_names
from fedsign.config import from_dict, load, merged
from fedsign.errors import ConfigError
from simulations import load_run, run
from simulations.jobs import digest_of

KEYS = [
    pytest.param(
        {"data": {"normalise": "unit"}},
        {"data": {"normalize": "unit"}},
        ("data.normalise", "data.normalize"),
        id="data",
    ),
    pytest.param(
        {"parameterisation": {"name": "sp"}},
        {"parameterization": {"name": "sp"}},
        ("parameterisation", "parameterization"),
        id="parameterization",
        marks=pytest.mark.needs("sparsity"),
    ),
]


def flat(tree: dict[str, Any]) -> str:
    ((section, keys),) = tree.items()
    ((key, value),) = keys.items()
    return f"{section}.{key}={value}"


@pytest.mark.parametrize(("former", "today", "names"), KEYS)
def test_a_former_key_is_taken_with_a_warning(
    former: dict[str, Any], today: dict[str, Any], names: tuple[str, str], tmp_path: Path
) -> None:
    """In a dictionary, in a file, with --set and in `replace`."""
    expected, said = from_dict(today), rf"^{names[0]} is now {names[1]}; the former name will be removed in 0\.3$"
    file = tmp_path / "experiment.toml"
    ((section, keys),) = former.items()
    file.write_text(f"[{section}]\n" + "".join(f'{key} = "{value}"\n' for key, value in keys.items()))
    key, _, value = flat(former).partition("=")
    with pytest.warns(FutureWarning, match=said):
        assert from_dict(former) == expected
    with pytest.warns(FutureWarning, match=said):
        assert load(file) == expected
    with pytest.warns(FutureWarning, match=said):
        assert load(None, [flat(former)]) == expected
    with pytest.warns(FutureWarning, match=said):
        assert from_dict({}).replace(**{key: value}) == expected
    assert expected.get(key, "") == value
    with pytest.raises(ConfigError, match=rf"^{names[0]} and {names[1]} were both given, .*; keep {names[1]}\.$"):
        from_dict(merged(former, today))


@pytest.mark.parametrize(("former", "today", "names"), KEYS)
def test_a_digest_is_that_of_the_former_names(
    former: dict[str, Any], today: dict[str, Any], names: tuple[str, str]
) -> None:
    """Else a comparison would run its finished cells again."""
    counted = former_names.former_tree(from_dict(today).result_settings())
    assert former_names.current_tree(counted, warns=False) == from_dict(today).result_settings() != counted
    assert digest_of(from_dict(today)) != digest_of(from_dict({}))


def test_a_run_that_was_stored_under_the_former_names_is_read_and_resumed_without_a_warning(
    tiny: dict[str, Any],
) -> None:
    done = run({**tiny, "data": {**tiny.get("data", {}), "normalize": "unit"}})
    file = done.path / "config.toml"
    then = file.read_text().replace("normalize", "normalise").replace("parameterization", "parameterisation")
    file.write_text(
        "".join(line for line in then.splitlines(keepends=True) if line.startswith("# run") or line[0] != "#")
    )
    stored = load_run(done.path)
    assert stored.config == done.config
    resumed = run({"rounds": 3}, resume=done.path)
    assert len(resumed.rounds) == 3
    assert "normalise" not in file.read_text()
    with pytest.raises(ConfigError, match="was started with another 'data'"), pytest.warns(FutureWarning):
        run({"data": {"normalise": "none"}}, resume=done.path)


@pytest.mark.needs("sparsity")
def test_a_former_command_is_taken_with_a_warning() -> None:
    from simulations.cli import app

    arguments = ["--set", "parameterization.name=sp", "--json"]
    said = CliRunner().invoke(app, ["analyze", "parameterization", *arguments], catch_exceptions=False)
    with pytest.warns(FutureWarning, match="^fedsign analyse is now fedsign analyze; "):
        former = CliRunner().invoke(app, ["analyse", "parameterisation", *arguments], catch_exceptions=False)
    assert former.stdout == said.stdout and json.loads(said.stdout)


def test_an_analysis_that_was_stored_under_the_former_names_is_read(tmp_path: Path) -> None:
    from fedsign.report.analysis import read_analysis
    from fedsign.storage.digests import sealed_json

    told = {
        "kind": "valley",
        "name": "valley",
        "facts": {"centre": {"loss": 0.5}, "own_centre": {"loss": 0.4}},
        "summary": [{"direction": "sgp_centred", "centre": 0.5}],
        "curves": [],
    }
    (tmp_path / "valley.json").write_text(sealed_json(told))
    with (tmp_path / "valley.npz").open("wb") as file:
        np.savez(file, centre=np.zeros(1))
    found = read_analysis(tmp_path / "valley.json")
    assert found.facts == {"center": {"loss": 0.5}, "own_center": {"loss": 0.4}}
    assert found.summary == [{"direction": "sgp_centered", "center": 0.5}] and list(found.arrays) == ["center"]
