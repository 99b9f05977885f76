"""Damaged checkpoints are set aside, records stay consistent, and `verify` finds damage that no round reads."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign.errors import ResultsError, ResumeError
from fedsign.storage import checkpoints
from fedsign.storage.checkpoints import Checkpoint
from fedsign.storage.results import RunFolder, read_records
from simulations import run
from simulations.verify import verify


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def damaged(folder: Path) -> set[str]:
    return {path.name for path, damage in verify(folder) if damage}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for round in (1, 2):
        checkpoints.save(tmp_path, Checkpoint(round=round, served={"w": torch.arange(3.0) + round}), keep=2)
    return tmp_path


def test_the_checkpoint_before_a_damaged_one_is_taken_and_said_aloud(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(saved / "round-000002" / "served.safetensors", -1)
    checkpoints.set_damaged_aside(saved)
    found = checkpoints.load_latest(saved)
    assert found is not None and found.served["w"].tolist() == [1, 2, 3]
    assert "round-000002 is damaged (served.safetensors: its digest does not match)" in caplog.text
    assert (saved / "damaged-round-000002").is_dir()  # nothing is lost


def test_a_second_damage_of_the_same_round_is_set_aside_too(saved: Path) -> None:
    for _ in range(2):
        flip(saved / "round-000002" / "served.safetensors", -1)
        checkpoints.set_damaged_aside(saved)
        checkpoints.save(saved, Checkpoint(round=2, served={"w": torch.arange(3.0)}), keep=2)
    aside = {path.name for path in saved.glob("damaged-*")}
    assert aside == {"damaged-round-000002", "damaged-round-000002-2"}


def test_what_a_kill_has_left_is_no_damage(saved: Path) -> None:
    (saved / "round-000003.partial").mkdir()
    (saved / "round-000003.partial" / "state.json").write_text("{")
    assert not damaged(saved)


def test_records_that_end_before_a_checkpoint_are_an_error_when_they_are_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for round in (1, 2, 3):
        folder.append("timings.jsonl", {"round": round})
    checkpoints.save(
        folder.checkpoints, Checkpoint(round=3, served={"w": torch.zeros(1)}, records=folder.chains()), keep=1
    )
    assert len(folder.timings()) == 3
    path = tmp_path / "timings.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    with pytest.raises(ResumeError, match=r"timings\.jsonl is missing or damaged \(1 lines are left"):
        folder.timings()


def test_where_no_checkpoint_is_whole_the_newest_is_named_and_all_stay(saved: Path) -> None:
    for round in (1, 2):
        flip(saved / f"round-00000{round}" / "state.json", 60)
    with pytest.raises(ResultsError, match="round-000002 is damaged"):
        checkpoints.set_damaged_aside(saved)
    assert checkpoints.rounds_on_disk(saved) == [1, 2]


def test_a_file_of_another_checkpoint_is_found_although_it_is_whole(saved: Path) -> None:
    shutil.copy(saved / "round-000001" / "served.safetensors", saved / "round-000002")
    with pytest.raises(ResultsError, match="its digest does not match"):
        checkpoints.load_latest(saved)


def test_lines_that_are_changed_lost_or_moved_are_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for round in range(1, 5):
        folder.append("rounds.jsonl", {"round": round})
    path = tmp_path / "rounds.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    last = folder.chains()["rounds.jsonl"]
    for wrong in (
        lines[1:],
        [lines[0], *lines[2:]],
        [lines[1], lines[0], *lines[2:]],
        [*lines[:3], lines[3].replace("4", "5")],
    ):
        path.write_text("".join(wrong), encoding="utf-8")
        with pytest.raises(ResultsError, match="its digest does not match"):
            read_records(path)
    path.write_text("".join(lines[:3]), encoding="utf-8")
    assert len(read_records(path)) == 3  # as a kill may have left it
    with pytest.raises(ResultsError, match="3 lines are left; a checkpoint counts on more"):
        read_records(path, until=last)


def test_lines_of_an_earlier_version_are_read_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"round": 1}\n{"round": 2}\n', encoding="utf-8")
    RunFolder(tmp_path).append("rounds.jsonl", {"round": 3})
    assert read_records(path) == [{"round": 1}, {"round": 2}, {"round": 3}]


def test_verify_finds_every_damaged_file_of_a_run_also_a_state_that_no_round_asks_for(tiny: dict[str, Any]) -> None:
    done = run({**tiny, "strategy": {"name": "feddyn"}})
    assert not damaged(done.path)
    for name in (
        "config.toml",
        "partition.json",
        "timings.jsonl",
        "model.safetensors",
        "checkpoints/round-000002/state.json",
    ):
        copy = shutil.copytree(done.path, done.path.with_name("copy"))
        flip(copy / name, 90)
        assert Path(name).name in damaged(copy)
        shutil.rmtree(copy)
    content = (done.folder.clients / "states.sqlite").read_bytes()
    state = content.rindex(b"__metadata__") if b"__metadata__" in content else content.rindex(b"data_offsets")
    flip(done.folder.clients / "states.sqlite", state + 200)
    assert damaged(done.path) == {"states.sqlite"}


def test_a_folder_without_anything_to_verify_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="holds nothing to verify; give the folder of a run"):
        list(verify(tmp_path))
