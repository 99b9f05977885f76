"""Disk contents are the old or the new version, whatever happens in between, including a full disk."""

import errno
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedsign.errors import DiskFullError, ResultsError, ResumeError
from fedsign.storage import checkpoints, disk, finding, results
from fedsign.storage.checkpoints import Checkpoint
from fedsign.storage.digests import sealed_json
from fedsign.storage.results import RunFolder, read_records


def checkpoint(round: int, *, size: int = 3) -> Checkpoint:
    generator = torch.Generator().manual_seed(round)
    tensors = {
        "w": torch.randn(size, generator=generator),
        "half": torch.randn(2, generator=generator).bfloat16(),
        "n": torch.tensor(round),
        "special": torch.tensor([math.nan, math.inf, -0.0]),
    }
    return Checkpoint(
        round=round,
        served=tensors,
        evaluated={"w": -tensors["w"]},
        strategy={"mean_h.w": tensors["w"] / 3},
        client_versions={11: round, 2: round - 1},
    )


def same_bits(left: dict[str, torch.Tensor] | None, right: dict[str, torch.Tensor] | None) -> bool:
    assert left is not None and right is not None
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].numpy(force=True).tobytes() == right[name].numpy(force=True).tobytes()
        if left[name].dtype != torch.bfloat16
        else torch.equal(left[name].view(torch.int16), right[name].view(torch.int16))
        for name in left
    )


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    return results.create(
        tmp_path, experiment="e", seed=0, config_toml="seed = 0\n", environment={"fedsign": "1"}, partition={}
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system, and not in every container")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_writer_that_raises_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    disk.write_text(path, "old")

    def write(partial: Path) -> None:
        partial.write_text("half of the new")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        disk.replace_file(path, write)
    assert path.read_text() == "old"
    disk.write_text(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_whose_filling_raises_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with disk.replaced_folder(path) as partial:
        disk.write_text(partial / "a", "old")
    with pytest.raises(ZeroDivisionError), disk.replaced_folder(path) as partial:
        (partial / "a").write_text("half of the new")
        raise ZeroDivisionError
    assert (path / "a").read_text() == "old"
    with disk.replaced_folder(path) as partial:
        disk.write_text(partial / "b", "new")
    assert [entry.name for entry in path.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "file.partial").touch()
    (tmp_path / "folder.partial" / "deeper").mkdir(parents=True)
    (tmp_path / "kept").touch()
    disk.remove_partials(tmp_path)
    disk.remove_partials(tmp_path / "not there")
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_a_full_disk_is_an_error_that_says_what_to_do(small_disk: Path) -> None:
    path = small_disk / "file"
    disk.write_text(path, "old")
    with pytest.raises(DiskFullError, match=r"the disk is full: .*file could not be written.*--resume"):
        disk.write_text(path, "x" * 100_000)
    assert path.read_text() == "old"


def test_a_full_disk_leaves_the_checkpoint_before(small_disk: Path) -> None:
    checkpoints.save(small_disk, checkpoint(1), keep=2)
    with pytest.raises(DiskFullError):
        checkpoints.save(small_disk, checkpoint(2, size=100_000), keep=2)
    with pytest.raises(DiskFullError):
        checkpoints.save_model(small_disk / "model.safetensors", checkpoint(2, size=100_000).served)
    assert checkpoints.rounds_on_disk(small_disk) == [1]
    loaded = checkpoints.load_latest(small_disk)
    assert loaded is not None and same_bits(loaded.served, checkpoint(1).served)


def test_a_full_disk_cuts_off_one_line_at_most(small_disk: Path) -> None:
    folder, written = RunFolder(small_disk), 0
    with pytest.raises(DiskFullError):
        for number in range(10_000):
            folder.append("rounds.jsonl", {"round": number, "text": "x" * 50})
            written += 1
    assert 100 < written < 10_000
    assert [line["round"] for line in folder.rounds()] == list(range(written))


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    given = checkpoint(7)
    checkpoints.save(tmp_path, given, keep=1)
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    assert (loaded.round, loaded.client_versions) == (7, {11: 7, 2: 6})
    assert same_bits(loaded.served, given.served)
    assert same_bits(loaded.evaluated, given.evaluated)
    assert same_bits(loaded.strategy, given.strategy)


def test_a_checkpoint_without_memory_comes_back_without(tmp_path: Path) -> None:
    shared = torch.zeros(2, 3)
    checkpoints.save(tmp_path, Checkpoint(round=1, served={"w": shared.t(), "tied": shared.t()}), keep=1)
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None
    assert (loaded.evaluated, loaded.strategy, loaded.client_versions) == (None, {}, {})
    assert torch.equal(loaded.served["tied"], torch.zeros(3, 2))
    assert checkpoints.load_latest(tmp_path / "empty") is None


def test_a_checkpoint_that_lost_its_clients_versions_is_damaged_and_does_not_begin_afresh(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoint(4), keep=1)
    (tmp_path / "round-000004" / "clients.safetensors").unlink()
    for read in (checkpoints.load_latest, checkpoints.client_versions_on_disk):
        with pytest.raises(ResultsError, match=r"round-000004 is damaged"):
            read(tmp_path)


def test_a_checkpoint_of_the_first_format_is_read(tmp_path: Path) -> None:
    """It had the versions of the clients' states in state.json."""
    checkpoints.save(tmp_path, checkpoint(4), keep=1)
    path = tmp_path / "round-000004"
    (path / "clients.safetensors").unlink()
    (path / "state.json").write_text(json.dumps({"format": 1, "round": 4, "client_versions": {"2": 3, "11": 4}}))
    loaded = checkpoints.load_latest(tmp_path)
    assert loaded is not None and loaded.client_versions == {2: 3, 11: 4}
    assert checkpoints.client_versions_on_disk(tmp_path) == {4: {2: 3, 11: 4}}


def test_the_versions_of_a_million_clients_take_bytes_and_not_seconds(tmp_path: Path) -> None:
    """16 bytes a client; as JSON it was seconds.  The same bits, whoever came first."""
    versions = {client * 7 % 1_000_003: client % 5 + 1 for client in range(1_000_000)}
    started_at = time.thread_time()
    for name, given in (("a", versions), ("b", dict(sorted(versions.items())))):
        checkpoints.save(tmp_path / name, Checkpoint(round=9, served={}, client_versions=given), keep=1)
    assert checkpoints.client_versions_on_disk(tmp_path / "a") == {9: versions}
    assert time.thread_time() - started_at < 10
    first, second = ((tmp_path / name / "round-000009" / "clients.safetensors").read_bytes() for name in "ab")
    assert first == second and len(first) < 16 * 1_000_000 + 1000


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for round in (1, 2, 10, 100):
        checkpoints.save(tmp_path, checkpoint(round), keep=2)
    assert checkpoints.rounds_on_disk(tmp_path) == [10, 100]


def test_a_kill_while_an_old_checkpoint_was_removed_does_not_stop_the_next_save(tmp_path: Path) -> None:
    """`_remove` takes state.json first; killed right after, it leaves a folder without one."""
    for round in (1, 2):
        checkpoints.save(tmp_path, checkpoint(round), keep=2)
    (tmp_path / "round-000001" / "state.json").unlink()
    checkpoints.save(tmp_path, checkpoint(3), keep=2)
    assert checkpoints.rounds_on_disk(tmp_path) == [2, 3]
    assert not (tmp_path / "round-000001").exists()


def test_a_checkpoint_that_is_half_removed_cannot_be_resumed_from(tmp_path: Path) -> None:
    for round in (1, 2):
        checkpoints.save(tmp_path, checkpoint(round), keep=2)
    (tmp_path / "round-000001" / "state.json").unlink()
    assert checkpoints.rounds_on_disk(tmp_path) == [2]


@pytest.mark.parametrize(
    "file",
    ["state.json", "served.safetensors", "evaluated.safetensors", "strategy.safetensors", "clients.safetensors"],
)
@pytest.mark.parametrize("keep_bytes", [0, 5, -1])
def test_a_damaged_checkpoint_is_a_sentence_with_the_remedy(tmp_path: Path, file: str, keep_bytes: int) -> None:
    checkpoints.save(tmp_path, checkpoint(4), keep=1)
    path = tmp_path / "round-000004" / file
    damaged = path.read_bytes().rstrip()[:keep_bytes]
    path.write_bytes(damaged)
    with pytest.raises(ResultsError, match=r"round-000004 is damaged .*restore it from a copy"):
        checkpoints.load_latest(tmp_path)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoint(4), keep=1)
    path = tmp_path / "round-000004" / "state.json"
    path.write_text(json.dumps({"format": 99}))
    with pytest.raises(ResultsError, match="format 99, this version reads 3"):
        checkpoints.load_latest(tmp_path)


def test_rewinding_drops_later_lines_and_the_half_one(run_folder: RunFolder) -> None:
    for name in ("rounds.jsonl", "timings.jsonl"):
        for round in (1, 2, 3):
            run_folder.append(name, {"round": round, "loss": 1 / round})
    before = (run_folder.path / "rounds.jsonl").read_text()
    with (run_folder.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    run_folder.conclude({"status": "failed"})
    (run_folder.path / "report.html.partial").touch()
    run_folder.rewind(2)
    assert (run_folder.path / "rounds.jsonl").read_text() == "".join(before.splitlines(keepends=True)[:2])
    assert [line["round"] for line in run_folder.timings()] == [1, 2]
    assert run_folder.outcome == {"status": "unfinished"}
    assert not list(run_folder.path.glob("*.partial"))
    run_folder.rewind(0)
    assert run_folder.rounds() == []


@pytest.mark.parametrize("kept", [(), (3, 4), (1, 2, 4), (1, 2), (1, 3, 2, 4), (1, 2, 2, 3, 4)])
def test_records_that_lack_a_checkpointed_round_are_refused_and_left_alone(
    run_folder: RunFolder, kept: tuple[int, ...]
) -> None:
    for round in kept:
        run_folder.append("rounds.jsonl", {"round": round})
    run_folder.conclude({"status": "failed"})
    path = run_folder.path / "rounds.jsonl"
    before = path.read_bytes() if kept else None
    with pytest.raises(ResumeError, match=rf"rounds\.jsonl does not hold .* 1 to 4 .*found: {len(kept)}"):
        run_folder.rewind(4)
    assert run_folder.outcome == {"status": "failed"}
    assert (path.read_bytes() if kept else None) == before


def test_the_line_that_a_kill_cut_off_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    assert read_records(path) == []
    path.write_text('{"round": 1}\n{"round": 2}')  # whole JSON, but its end is missing
    assert read_records(path) == [{"round": 1}]


def test_a_damaged_line_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"round": 1}\n\0\0\0\0\n{"round": 3}\n')
    with pytest.raises(ResultsError, match=r"rounds\.jsonl"):
        read_records(path)


def test_a_figure_that_diverged_is_null(run_folder: RunFolder) -> None:
    run_folder.append("rounds.jsonl", {"loss": math.nan, "high": math.inf, "low": -math.inf, "x": 0.1}, durable=True)
    (line,) = (run_folder.path / "rounds.jsonl").read_text().splitlines()
    assert line.startswith('{"loss": null, "high": null, "low": null, "x": 0.1, "chain": "')


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    def start(_: int) -> Path:
        return results.create(tmp_path, experiment="e", seed=0, config_toml="", environment={}, partition={}).path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(start, range(16)))
    assert len({path.name[:15] for path in paths}) < 16, "some did start in the same second"
    assert len(set(paths)) == 16
    assert {folder.path for folder in finding.find_runs(tmp_path)} == set(paths)


def test_a_run_is_opened_by_its_folder_or_a_file_in_it(run_folder: RunFolder, tmp_path: Path) -> None:
    assert finding.open_run(run_folder.path) == finding.open_run(run_folder.path / "report.html") == run_folder
    assert run_folder.config_toml.endswith("# fedsign: 1\n\nseed = 0\n")
    with pytest.raises(ResultsError, match="is not a run"):
        finding.open_run(tmp_path)
    (run_folder.path / "partition.json").unlink()
    with pytest.raises(ResultsError, match=r"partition\.json is missing or damaged"):
        _ = run_folder.partition


def test_a_root_that_cannot_hold_runs_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match=r"results\.root=.*file cannot hold runs.*--set results\.root=PATH"):
        results.create(tmp_path / "file", experiment="e", seed=0, config_toml="", environment={}, partition={})


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT])
def test_a_target_that_cannot_be_written_is_a_sentence(tmp_path: Path, code: int) -> None:
    target = tmp_path / "folder" / "file"
    for culprit in (target, target.with_name("file.partial"), target.parent, tmp_path):
        with pytest.raises(ResultsError, match=r"file could not be written: .*writable"), disk.disk_errors(target):
            raise OSError(code, os.strerror(code), str(culprit))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_apart(tmp_path: Path, code: int) -> None:
    with pytest.raises(DiskFullError), disk.disk_errors(tmp_path):
        raise OSError(code, os.strerror(code))


def test_an_error_of_another_file_passes(tmp_path: Path) -> None:
    """A run is executed inside `disk_errors`: a user's data file that is missing is no matter of the run's folder."""
    with pytest.raises(FileNotFoundError), disk.disk_errors(tmp_path / "runs" / "a"):
        (tmp_path / "data.csv").read_text()
    with pytest.raises(OSError, match="Input/output"), disk.disk_errors(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))


def test_a_folder_that_does_not_exist_and_cannot_be_made_is_a_sentence() -> None:
    with pytest.raises(ResultsError, match=r"/proc/nowhere/file could not be written"):
        disk.write_text(Path("/proc/nowhere/file"), "text")


def test_model_of_a_run_that_is_killed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill leaves the former model in place, and it still belongs to the run after any number of them."""
    path, former = tmp_path / "best.safetensors", {"weight": torch.zeros(3)}
    (tmp_path / "manifest.json").write_text(sealed_json({"format": 1, "files": {}}), "utf-8")
    checkpoints.save_model(path, former)
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", _replace_all_but(path, Path.replace))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save_model(path, {"weight": torch.ones(3)})
    assert checkpoints.load_model(path)["weight"].equal(former["weight"])
    checkpoints.save_model(path, {"weight": torch.ones(3)})
    assert len(RunFolder(tmp_path).manifest["models"][path.name]) == 1


def _replace_all_but(path: Path, replace: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    def replaced(partial: Path, target: Path) -> Path:
        if target == path:
            raise KeyboardInterrupt
        return replace(partial, target)

    return replaced
