"""The command line, as a user starts it."""

import errno
import json
import logging
import math
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedsign.registry import KINDS
from simulations import cli
from simulations.output import Output
from simulations.progress import LogLines, text_of
from tests.e2e.command import fedsign, settings

QUICK = settings(rounds=2, partition__num_clients=4, partition__alpha=1.0, server__cohort_size=2)


def test_a_run_prints_its_figures_and_leaves_results_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what Rich takes for a terminal
    done = fedsign("run", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "digits-fedavg").iterdir()
    assert str(run.relative_to(tmp_path)) in done.stdout
    assert "accuracy" in done.stdout
    assert "round   2/2" in done.stderr  # the progress bar
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 2
    header = (run / "config.toml").read_text(encoding="utf-8")
    assert "# torch: " in header and "# flwr: " in header


def test_without_a_terminal_there_is_the_folder_first_and_then_a_line_every_30_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fedsign("run", *QUICK, folder=tmp_path)
    (run,) = (tmp_path / "runs" / "digits-fedavg").iterdir()
    first, last = done.stderr.splitlines()
    assert first == f"run {run.relative_to(tmp_path)}"
    assert last.startswith("round 2/2  accuracy 0.")
    for every_s, said in (
        (30.0, ["first", "round 3/4  loss 1  "]),
        (0.0, ["first", *(f"round {n}/4  loss 1  " for n in (2, 3))]),
    ):
        lines = LogLines(1, 4, unit="round", first="first", output=Output(every_s=every_s))
        for round in (2, 3):
            lines.show(round, {"loss": 1})
        lines.stop()
        assert [
            line.partition("1  ")[0] + line.partition("1  ")[1] for line in capsys.readouterr().err.splitlines()
        ] == said


def test_the_written_configuration_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    assert fedsign("run", *QUICK, folder=tmp_path).returncode == 0
    (first,) = (tmp_path / "runs" / "digits-fedavg").iterdir()
    assert fedsign("run", str(first / "config.toml"), folder=tmp_path).returncode == 0
    (second,) = {*(tmp_path / "runs" / "digits-fedavg").iterdir()} - {first}
    assert (first / "rounds.jsonl").read_bytes() == (second / "rounds.jsonl").read_bytes()
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_show_config_prints_a_complete_configuration_and_runs_nothing(tmp_path: Path) -> None:
    done = fedsign("run", "--show-config", *settings(strategy__name="feddyn"), folder=tmp_path)
    tree = tomllib.loads(done.stdout)
    assert tree["strategy"] == {"name": "feddyn", "alpha": 0.05}
    assert tree["client"]["optimizer"] == {"name": "sgd", "momentum": 0.9, "nesterov": False}
    assert not (tmp_path / "runs").exists()


def test_runs_lists_what_is_on_disk(tmp_path: Path) -> None:
    assert "no runs" in fedsign("runs", folder=tmp_path).stdout
    assert fedsign("run", *QUICK, folder=tmp_path).returncode == 0
    (row,) = json.loads(fedsign("runs", "--json", folder=tmp_path).stdout)
    assert (row["status"], row["rounds"], row["strategy"]) == ("finished", "2/2", "fedavg")


def test_report_writes_the_page_again(tmp_path: Path) -> None:
    assert fedsign("run", *QUICK, *settings(callbacks=[]), folder=tmp_path).returncode == 0
    (run,) = (tmp_path / "runs" / "digits-fedavg").iterdir()
    assert not (run / "report.html").exists()
    done = fedsign("report", str(run), folder=tmp_path)
    assert done.returncode == 0
    assert (run / "report.html").exists()


def test_a_former_key_is_one_line_of_warning(tmp_path: Path) -> None:
    done = fedsign("run", "--show-config", "--set", "data.normalise=none", folder=tmp_path)
    assert done.stderr == "warning: data.normalise is now data.normalize; the former name will be removed in 0.3\n"
    assert 'normalize = "none"' in done.stdout


def test_resume_adds_rounds_but_refuses_another_experiment(tmp_path: Path) -> None:
    assert fedsign("run", *QUICK, folder=tmp_path).returncode == 0
    (run,) = (tmp_path / "runs" / "digits-fedavg").iterdir()
    assert fedsign("run", "--resume", str(run), *settings(rounds=3), folder=tmp_path).returncode == 0
    assert len((run / "rounds.jsonl").read_text().splitlines()) == 3
    refused = fedsign("run", "--resume", str(run), *settings(client__lr=0.5), folder=tmp_path)
    assert refused.returncode == 2
    assert "another 'client'" in refused.stderr
    records = run / "rounds.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[1:]))
    refused = fedsign("run", "--resume", str(run), *settings(rounds=4), folder=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "rounds.jsonl is missing or damaged (line 1: its digest does not match)" in refused.stderr


def test_doctor_finds_nothing_broken(tmp_path: Path) -> None:
    done = fedsign("doctor", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    states = {row["what"]: row["state"] for row in json.loads(done.stdout)}
    assert states["torchvision"] == "ok"
    assert states.get("engine superlink") == ("ok" if "superlink" in KINDS["engine"].table else None)


def test_list_names_the_tables_and_the_nearest_for_a_misspelt_one(tmp_path: Path) -> None:
    rows = json.loads(fedsign("list", "strategies", "--json", folder=tmp_path).stdout)
    assert {"fedavg", "feddyn", "fedsign"} <= {row["name"] for row in rows}
    traits = json.loads(fedsign("list", "strategies", "scaffold", "--json", folder=tmp_path).stdout)
    assert {"trait": "takes_parts", "value": False} in traits
    wrong = fedsign("list", "strategy", folder=tmp_path)
    assert wrong.returncode == 2
    assert "Did you mean 'strategies'?" in wrong.stderr


def test_runs_shows_a_damaged_run_and_lists_the_others(tmp_path: Path) -> None:
    assert fedsign("run", *QUICK, folder=tmp_path).returncode == 0
    contents = {"cut off": b'name = "x', "foreign": b"[tool]\n", "binary": b"\xff\xfe\0"}
    for name, content in contents.items():
        folder = tmp_path / "runs" / "other" / name
        folder.mkdir(parents=True)
        (folder / "config.toml").write_bytes(content)
    done = fedsign("runs", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert sorted(row["status"] for row in rows) == ["damaged", "damaged", "damaged", "finished"]
    assert all(row.keys() == rows[0].keys() for row in rows)


def test_the_path_of_a_run_is_in_one_piece_where_the_output_is_narrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "runs" / ("a" * 90) / ("b" * 90)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    done = fedsign("runs", folder=tmp_path)
    assert done.stdout.splitlines()[0] == str(folder.relative_to(tmp_path))


def test_ctrl_c_leaves_with_the_command_that_goes_on(tmp_path: Path) -> None:
    # A shell's background jobs ignore SIGINT, and so does what they start: give the program a terminal's manners.
    launcher = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    program = [sys.executable, "-m", "simulations.cli", "run", *QUICK, *settings(rounds=100_000, callbacks=[])]
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, *program], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/*/*/rounds.jsonl")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    (run,) = tmp_path.glob("runs/*/*")
    assert process.returncode == 130, stderr
    assert stderr == f"stopped; resume with: fedsign run --resume {run.relative_to(tmp_path)}\n"
    completed = len((run / "rounds.jsonl").read_text().splitlines())
    resumed = fedsign(*shlex.split(stderr)[4:], *settings(rounds=completed + 1), folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(130)], ids=repr)
def test_ctrl_c_before_there_is_a_run_says_no_more_than_that(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left_with(error, monkeypatch) == 130
    assert capsys.readouterr().err == "stopped.\n"


def test_an_unexpected_exception_is_one_line_unless_its_place_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left_with(ZeroDivisionError("by [zero]\nand more"), monkeypatch) == 1
    assert capsys.readouterr().err == (
        "Error: unexpected ZeroDivisionError: by [zero]; this is a bug in FedSign or in your module: rerun with "
        "FEDSIGN_TRACEBACK=1 to see where\n"
    )
    monkeypatch.setenv("FEDSIGN_TRACEBACK", "0")
    assert left_with(ZeroDivisionError("by zero"), monkeypatch) == 1
    monkeypatch.setenv("FEDSIGN_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        left_with(ZeroDivisionError("by zero"), monkeypatch)


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        ([20_000] * 2, "Error: the memory of this machine"),
        ([2_500] * 2, "Error: the memory of this machine"),
    ],
    ids=["a model", "a step"],
)
def test_too_little_memory_names_the_command_that_estimates_it(hidden: list[int], said: str, tmp_path: Path) -> None:
    """1.6 GB where 100 MB are left; and 25 MB for the model, its gradients, updates, and copies, in the rehearsal."""
    failed = fedsign("run", *settings(model__hidden=hidden, rounds=1), folder=tmp_path, spare_bytes=100 * 2**20)
    assert failed.returncode == 1 and "bug in FedSign" not in failed.stderr and "allocate" not in failed.stderr
    assert said in failed.stderr and "'fedsign estimate memory' says what an experiment needs" in failed.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/data/x"), "/data/x cannot be used (Is a directory)"),
        (
            PermissionError(errno.EACCES, "Permission denied", b"/data/\xff"),
            "/data/\\xff cannot be used (Permission denied)",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/data/x"), "/data/x cannot be used (Read-only file system)"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), "cannot be used (File name too long)"),
        (OSError(errno.EMFILE, "Too many open files"), "this machine refused a step (Too many open files)"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "the memory of this machine, or its limit"),
        (UnicodeEncodeError("utf-8", "/data/\udcff", 6, 7, "surrogates not allowed"), r"'/data/\udcff', is not UTF-8"),
        (MemoryError(), "the memory of this machine, or its limit"),
    ],
    ids=repr,
)
def test_what_the_machine_refuses_is_no_bug(
    error: OSError, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left_with(error, monkeypatch)
    printed = capsys.readouterr().err
    assert said in printed and "bug in FedSign" not in printed and printed.count("\n") == 1


def left_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of `fedsign doctor` if examining the machine raises."""

    def examine() -> None:
        raise error

    monkeypatch.setattr("simulations.doctor.examine", examine)
    monkeypatch.setattr("sys.argv", ["fedsign", "doctor"])
    monkeypatch.setattr(logging.getLogger("fedsign"), "handlers", [])  # `main` adds one
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def test_the_progress_bar_says_that_a_figure_diverged() -> None:
    assert [text_of({"loss": value}) for value in (0.5, None, math.nan, math.inf)] == [
        f"loss {said}" for said in ("0.5000", *["diverged"] * 3)
    ]
