"""`fedsign runs`: the list, tags and notes, removal."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedsign.config import ExperimentConfig, from_dict, load
from fedsign.errors import ConfigError, ResultsError
from fedsign.registry import KINDS
from fedsign.report.page import render
from fedsign.report.summary import read
from fedsign.sections import Part, tables
from fedsign.storage.digests import sealed_json
from fedsign.storage.disk import exclusive
from fedsign.storage.finding import open_run
from fedsign.storage.results import RunFolder, changed_settings
from fedsign.storage.tags import Tags, read_tags, write_tags
from simulations import Run, load_run, run
from simulations.runs import listing
from simulations.runs.removal import removable, remove
from simulations.verify import verify
from tests.e2e.command import fedsign


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that the tests copy."""
    changes = {"rounds": 2, "callbacks": ["report"], "partition": {"num_clients": 4, "alpha": 1.0}}
    small = {"client": {"lr": 0.02, "local_epochs": 1}, "server": {"cohort_size": 2}, "strategy": {"name": "feddyn"}}
    return run({**changes, **small, "results": {"root": str(tmp_path_factory.mktemp("whole"))}})


@pytest.fixture
def done(whole: Run, folder: Path) -> Run:
    return load_run(shutil.copytree(whole.path, folder / "runs" / whole.path.parent.name / whole.path.name))


def listed(done: Run) -> dict[str, Any]:
    (row,) = listing.rows(done.path.parents[1])
    assert row["run"] == str(done.path)
    return row


# --- what is listed


def test_a_row_has_the_data_the_changed_settings_and_the_best_and_last_values(done: Run) -> None:
    row, accuracies = listed(done), [record["accuracy"] for record in done.rounds]
    assert (row["name"], row["data"], row["strategy"], row["status"]) == (
        "digits-feddyn",
        "digits",
        "feddyn",
        "finished",
    )
    assert row["best"] == max(accuracies) == done.rounds[row["best_round"] - 1]["accuracy"]
    assert row["last"] == pytest.approx(sum(accuracies) / len(accuracies))
    assert row["changed"]["client.lr"] == 0.02 and "client.batch_size" not in row["changed"]
    assert row["changed"] == {path: value for path, (value, _) in done.config.changed().items()}


@pytest.mark.needs("selection")
def test_early_stopping_and_the_best_model_are_changes_and_where_results_are_is_none(done: Run) -> None:
    kept = {"root": "elsewhere", "checkpoint_every": 1, "keep_best": True, "patience": 3}
    changed = from_dict({"results": kept, "data": {"validation_fraction": 0.1}}).changed()
    row = listed(done) | {"changed": {path: value for path, (value, _) in changed.items()}}
    assert listing.short_changes(row) == "validation_fraction=0.1, keep_best=true, patience=3"


def test_the_best_loss_is_the_lowest_and_a_diverged_round_is_none() -> None:
    records = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": None}, {"round": 3, "loss": 0.7}]
    assert listing._best(records, "loss")["round"] == 1
    assert listing._best(records, "accuracy") == {}


COMPONENTS = [
    (path, name)
    for path, table in tables(ExperimentConfig)
    if issubclass(table, Part)
    for name in KINDS[table.kind].table
]


def test_the_settings_of_a_component_are_no_changes_beside_its_name() -> None:
    found = {}
    for path, name in COMPONENTS:
        with suppress(ConfigError):  # some do not run with their defaults in the default experiment
            found[path, name] = {*load(None, [f"{path}.name={name}"]).changed()}
    assert len(found) > 50 and all(changed <= {f"{path}.name"} for (path, _), changed in found.items()), found


def test_settings_changed_are_those_that_are_not_the_components_own_defaults(done: Run) -> None:
    assert from_dict({}).changed() == {}
    other = from_dict({"model": {"name": "linear"}, "client": {"optimizer": {"name": "adam", "beta2": 0.9}}})
    assert other.changed() == {
        "model.name": ("linear", "mlp"),
        "client.optimizer.name": ("adam", "sgd"),
        "client.optimizer.beta2": (0.9, 0.999),
    }
    assert changed_settings(done.folder.config_toml) == done.config.changed()
    resumed = run({"rounds": 3}, resume=done.path)
    assert (changed_settings(resumed.folder.config_toml) or {})["rounds"] == (3, 40)


def test_the_page_begins_with_the_changed_settings(done: Run) -> None:
    page = render(read(done.folder))
    assert '<dt>client.lr</dt><dd>0.02</dd><dd class="remark">default 0.05</dd>' in page
    assert page.index("<dt>client.lr</dt>") < page.index("All settings")


def test_a_run_without_the_header_of_its_changes_is_listed(done: Run) -> None:
    file = done.path / "config.toml"
    lines = file.read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if line.startswith("# run: ") or not line.startswith("#"))
    file.write_text(text)
    assert listed(done)["changed"] == {} and listed(done)["status"] == "finished"
    assert "differ from the defaults" not in render(read(done.folder))


def test_a_running_run_is_listed_as_such(done: Run) -> None:
    (done.path / "outcome.json").unlink()
    assert listed(done)["status"] == "unfinished"
    with done.folder.locked():
        assert listed(done)["status"] == "running"


def test_a_damaged_run_is_listed_with_its_damage_and_with_its_tags(done: Run) -> None:
    write_tags(done.folder, Tags(tags=("kept",)))
    records = done.path / "rounds.jsonl"
    records.write_text(records.read_text().replace('"round": 1', '"round": 7'))
    row = listed(done)
    assert row["status"] == "damaged" and "rounds.jsonl is missing or damaged" in row["damage"]
    assert (row["tags"], row["strategy"]) == (["kept"], "feddyn")


def test_the_data_of_a_file_are_shown_by_its_name_and_the_file_not_among_the_changes() -> None:
    row = listing._EMPTY | {"run": "r", "data": "npz", "file": "a/wine.npz", "changed": {"data.path": "a/wine.npz"}}
    assert listing._cells(row)["data"] == "wine.npz" and listing._cells(row)["changed"] == "-"


def test_the_number_of_findings_is_listed(done: Run) -> None:
    assert listed(done)["findings"] == 0 and listing._cells(listed(done))["findings"] == "-"
    done.folder.append("findings.jsonl", {"round": 1, "rule": "plateau", "message": "flat", "remedy": "raise lr"})
    row = listed(done)
    assert row["findings"] == 1 and listing._cells(row)["findings"] == "1"
    assert [*listing._block(listing._cells(row))][-1].endswith(", 1 finding")


def test_a_text_of_a_run_cannot_move_the_terminals_cursor() -> None:
    row = listing._EMPTY | {"run": "r", "strategy": "\x1b[2Jx\n", "data": "digits"}
    assert listing._cells(row)["strategy"] == " [2Jx "


def test_a_narrow_terminal_has_a_block_for_each_run(done: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tags(done.folder, Tags(tags=("paper",)))
    monkeypatch.setenv("FORCE_COLOR", "1")  # what Rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    first, data, figures = fedsign("runs", folder=folder).stdout.splitlines()
    assert first == f"{done.path.relative_to(folder)}  [paper]"
    assert data.startswith("  digits, feddyn: ") and figures.startswith("  finished 2/2, accuracy 0.")
    monkeypatch.setenv("COLUMNS", "300")
    assert len(fedsign("runs", folder=folder).stdout.splitlines()) == 2


def test_a_pipe_is_as_wide_as_columns_says(done: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert len(fedsign("runs", folder=folder).stdout.splitlines()) == 3
    monkeypatch.delenv("COLUMNS")
    assert len(fedsign("runs", folder=folder).stdout.splitlines()) == 2


def test_the_cells_of_comparisons_are_listed_but_not_what_was_set_aside(done: Run, folder: Path) -> None:
    cell = shutil.copytree(done.path, folder / "comparisons" / "mine" / "cells" / "fedavg-seed0-1a" / done.path.name)
    shutil.copytree(done.path, cell.parent / "set-aside" / done.path.name)
    for root in (folder / "comparisons", folder / "comparisons" / "mine", cell.parent):
        assert [row["run"] for row in listing.rows(root)] == [str(cell)]
    assert len(listing.rows(folder)) == 2


# --- names


def test_a_run_is_found_by_its_folder_its_name_and_a_file_in_it(done: Run) -> None:
    name, id = done.path.parent.name, done.path.name
    for given in (done.path, done.path / "rounds.jsonl", f"runs/{name}/{id}", f"{name}/{id}", id, name):
        assert open_run(Path(given)).path.samefile(done.path), given
    with pytest.raises(ResultsError, match=r"\. is not a run: there is no config\.toml in it"):
        open_run(Path())
    for given in ("nothing", "../runs", "rounds.jsonl", "*"):
        with pytest.raises(ResultsError, match=rf"^there is no run {re.escape(given)}\. 'fedsign runs' lists"):
            open_run(Path(given))


def test_the_nearest_name_of_a_run_is_suggested(done: Run) -> None:
    name, id = done.path.parent.name, done.path.name
    for given, meant in ((f"{name[:-2]}x", name), (f"runs/{name}x/{id}", f"runs/{name}/{id}"), (f"{id}1", id)):
        with pytest.raises(ResultsError, match=rf"^there is no run {given}\. Did you mean '{meant}'\?"):
            open_run(Path(given))


def test_a_name_of_several_runs_is_refused(done: Run) -> None:
    shutil.copytree(done.path, other := done.path.with_name("20990101-000000-seed1"))
    with pytest.raises(ResultsError, match=rf"could be any of 2 runs; .*{other.name}\."):
        open_run(Path(done.path.parent.name))
    assert open_run(Path(other.name)).path.samefile(other)


def test_all_commands_take_a_run_by_its_name(done: Run, folder: Path) -> None:
    name = f"{done.path.parent.name}/{done.path.name}"
    for command in (["runs", "tag"], ["runs", "verify"], ["report"], ["run", "--resume"], ["runs", "remove", "--yes"]):
        said = fedsign(*command, name, folder=folder)
        assert said.returncode == 0, (command, said.stderr)
    assert not done.path.exists()


# --- tags and notes


def test_tags_are_written_filtered_by_shown_on_the_page_and_removed(done: Run, folder: Path) -> None:
    path = str(done.path)
    tagged = fedsign("runs", "tag", path, "--tag", "paper", "--tag", "table/2", "--note", "<b>good", folder=folder)
    assert tagged.stdout == f"{path}  paper table/2  <b>good\n", tagged.stderr
    page = (done.path / "report.html").read_text(encoding="utf-8")
    assert "paper, table/2" in page and "&lt;b&gt;good" in page and "<b>good" not in page
    for tags, found in ((("paper",), 1), (("paper", "table/2"), 1), (("paper", "other"), 0)):
        options = [word for tag in tags for word in ("--tag", tag)]
        assert len(json.loads(fedsign("runs", *options, "--json", folder=folder).stdout)) == found
    assert fedsign("runs", "tag", path, "--untag", "paper", "--note", "", folder=folder).returncode == 0
    assert read_tags(done.folder) == Tags(tags=("table/2",))
    assert fedsign("runs", "tag", path, "--untag", "table/2", folder=folder).returncode == 0
    assert not (done.path / "tags.json").exists()


def test_tags_are_verified_and_survive_resuming(done: Run) -> None:
    write_tags(done.folder, Tags(tags=("paper",), note="kept"))
    run({"rounds": 3}, resume=done.path)
    assert read_tags(done.folder) == Tags(tags=("paper",), note="kept")
    assert (done.path / "tags.json", "") in [*verify(done.path)]
    text = (done.path / "tags.json").read_text()
    (done.path / "tags.json").write_text(text.replace("paper", "pauer"))
    assert [file.name for file, damage in verify(done.path) if damage] == ["tags.json"]
    with pytest.raises(ResultsError, match="delete it, and tag the run again"):
        read_tags(done.folder)
    assert listed(done)["status"] == "damaged" and "tags.json" in listed(done)["damage"]
    run({"rounds": 4}, resume=done.path)  # which does not depend on them
    assert "tags.json is damaged" in (done.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [{"tags": "paper", "note": ""}, {"tags": ["\x1b"], "note": ""}, {"tags": [1]}, {}])
def test_a_foreign_file_of_tags_is_damage(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tags.json").write_text(sealed_json(content))
    with pytest.raises(ResultsError, match=r"tags\.json is damaged"):
        read_tags(RunFolder(tmp_path))


@pytest.mark.parametrize("tag", ["", "a b", "-x", "x" * 51, "a\n", "[b]"])
def test_a_tag_is_a_word(tag: str) -> None:
    with pytest.raises(ConfigError, match="expected a word"):
        Tags(tags=(tag,))
    assert Tags(tags=("über-1", "a/b", "lr:0.1")).tags


def test_a_tag_that_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(ConfigError, match="the run has a, b"):
        Tags(tags=("a", "b")).with_changes(remove=["c"])
    assert Tags(tags=("a", "b")).with_changes(add=["b", "c"], remove=["a"], note="n") == Tags(tags=("b", "c"), note="n")


# --- removal


def test_a_removed_run_is_gone_with_the_folder_of_its_name(done: Run, tiny: dict[str, Any]) -> None:
    other = run({**tiny, "name": "other"})
    for folder in removable([done.path, done.path / ".", done.path]):
        remove(folder)
    assert not done.path.parent.exists() and other.path.exists()


@pytest.fixture
def comparison(done: Run) -> Path:
    """comparisons/digits with two cells, one of which has a run."""
    path = Path("comparisons/digits")
    shutil.copytree(done.path, path / "cells" / "fedavg-1" / done.path.name)
    (path / "cells" / "fedsign-2").mkdir()
    (path / "comparison.json").write_text(sealed_json({"format": 2, "cells": []}))
    return path


def test_a_comparison_is_removed_with_its_runs_by_its_folder_or_its_name(comparison: Path, done: Run) -> None:
    (cell,) = comparison.glob("cells/fedavg-1/*/")
    for given in (comparison, Path("digits")):
        (found,) = removable([cell, given, comparison])
        assert (found.path, found.kind, found.num_runs) == (comparison, "comparison", 1)
    remove(found)
    assert not comparison.exists() and Path("comparisons").exists() and done.path.exists()


def test_the_question_says_how_many_runs_a_comparison_has(comparison: Path, done: Run) -> None:
    outer, inner = pty.openpty()
    os.write(outer, b"y\n")
    command = [sys.executable, "-m", "simulations.cli", "runs", "remove", "digits", str(done.path)]
    asked = subprocess.run(command, stdin=inner, capture_output=True, text=True, check=True)
    os.close(outer)
    os.close(inner)
    assert ", a comparison with 1 run\n" in asked.stdout and "Delete these 2 runs and comparisons" in asked.stdout
    assert not comparison.exists() and not done.path.exists()


def test_a_comparison_with_a_link_in_use_or_damaged_is_not_removed(comparison: Path, folder: Path) -> None:
    (cell,) = comparison.glob("cells/fedavg-1/*/")
    for lock, said in ((comparison / "lock", "the comparison in .* is in use"), (cell / "lock", "the run in .* is in")):
        with exclusive(lock, name="it"), pytest.raises(ResultsError, match=said):
            removable([comparison])
    (cell / "out").symlink_to(folder)
    with pytest.raises(ResultsError, match="holds a link, cells/fedavg-1"):
        removable([comparison])
    (cell / "out").unlink()
    (folder / "link").symlink_to(comparison)
    with pytest.raises(ResultsError, match=r"is a link to .*; give the comparison's own folder"):
        removable([Path("link")])
    (comparison / "comparison.json").write_text("{}")
    with pytest.raises(ResultsError, match="damaged or foreign; delete it yourself"):
        removable([comparison])


def link_to_the_run(path: Path) -> Path:
    link = path.with_name("link")
    link.symlink_to(path)
    return link


def with_a_link_in_it(path: Path) -> Path:
    (path / "clients").mkdir(exist_ok=True)
    (path / "clients" / "out").symlink_to("/etc")
    return path


def without_its_environment(path: Path) -> Path:
    (path / "environment.json").unlink()
    return path


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (link_to_the_run, "is a link to"),
        (with_a_link_in_it, "holds a link, clients/out to /etc"),
        (without_its_environment, "there is no environment.json in it"),
        (lambda path: path.parent, "there is no config.toml in it"),
        (lambda path: path / "config.toml", "is no folder"),
        (lambda path: path / "nothing", "is no folder"),
        (lambda path: Path("nowhere"), "there is no run nowhere"),
    ],
)
def test_what_is_no_run_or_has_links_is_not_removed(made: Callable[[Path], Path], expected: str, done: Run) -> None:
    files = len([*done.path.rglob("*")])
    with pytest.raises(ResultsError, match=expected):
        removable([made(done.path)])
    assert len([*done.path.rglob("*")]) >= files - 1 > 5


def test_a_run_in_use_and_the_current_folder_are_not_removed(done: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with done.folder.locked(), pytest.raises(ResultsError, match="in use"):
        removable([done.path])
    path = done.path.resolve()
    monkeypatch.chdir(path / "checkpoints")
    with pytest.raises(ResultsError, match="current folder"):
        removable([path])


def test_nothing_is_removed_if_one_of_several_cannot_be(done: Run, tmp_path: Path) -> None:
    refused = fedsign("runs", "remove", "--yes", str(done.path), "nowhere", folder=tmp_path)
    assert refused.returncode == 2 and done.path.exists()


def test_a_question_comes_first(done: Run, tmp_path: Path) -> None:
    refused = fedsign("runs", "remove", str(done.path), folder=tmp_path)
    assert refused.returncode == 2 and "add --yes" in refused.stderr
    for answer, code in (("n", 1), ("y", 0)):
        outer, inner = pty.openpty()
        os.write(outer, f"{answer}\n".encode())
        command = [sys.executable, "-m", "simulations.cli", "runs", "remove", str(done.path)]
        asked = subprocess.run(command, stdin=inner, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert asked.returncode == code, asked.stderr
        assert "Delete this run for good?" in asked.stdout and done.path.exists() == (answer == "n")
        os.close(outer)
        os.close(inner)


def test_a_run_half_removed_by_a_killed_command_can_be_removed(done: Run) -> None:
    shutil.rmtree(done.path / "checkpoints")
    (done.path / "rounds.jsonl").unlink()
    (folder,) = removable([done.path])
    remove(folder)
    assert not done.path.exists()
