"""docs/how-to/sites.md: its hospitals are created, and its experiment runs as written."""

import json
import tomllib
from pathlib import Path

import pytest

from fedsign.config import from_dict, load
from simulations.api import load_run, run
from tests.e2e.test_docs import snippets

PAGE = "docs/how-to/sites.md"
pytestmark = pytest.mark.needs("images")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(made)
        (source,) = snippets(PAGE, "python")
        exec(compile(source, PAGE, "exec"), {})
    (made / "hospitals.toml").write_text(snippets(PAGE, "toml")[0], encoding="utf-8")
    return made


def test_the_hospitals_learn_in_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fedsign run hospitals.toml\n" in snippets(PAGE, "bash")
    monkeypatch.chdir(folder)
    done = run(load(Path("hospitals.toml"), [f"results.root={tmp_path}", 'callbacks=["report"]']))
    assert done.rounds[-1]["accuracy"] > 0.8 and not any(line["failures"] for line in done.rounds)
    last = json.loads((done.path / "sites.jsonl").read_text().splitlines()[-1])
    assert [site["name"] for site in last["sites"]] == ["north", "south", "west"]
    assert done.folder.partition["counts"][1][2] == 0, "the second hospital has no rare case"
    assert load_run(done.path).config.data.settings["class_names"] == ["healthy", "ill", "rare"]


def test_the_commands_of_the_page_name_settings_that_exist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    load(Path("hospitals.toml"), ["engine.name=superlink", "engine.share_details=true"])


def test_without_roots_the_experiment_is_one_for_a_federation(folder: Path) -> None:
    tree = tomllib.loads((folder / "hospitals.toml").read_text(encoding="utf-8"))
    del tree["partition"]["roots"]
    config = from_dict({**tree, "engine": {"name": "superlink"}})
    assert config.partition.settings["roots"] == []
