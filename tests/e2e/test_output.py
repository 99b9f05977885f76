"""What commands print on standard error: as the options of the root command, the terminal, and the environment ask."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulations.cli import app
from simulations.output import Output
from simulations.progress import LogLines
from tests.e2e.command import fedsign, settings

QUICK = ["run", *settings(rounds=3, partition__num_clients=4, partition__alpha=1.0, server__cohort_size=2)]


@pytest.mark.parametrize("arguments", [["--quiet", *QUICK], [*QUICK, "--quiet"], [QUICK[0], "-q", *QUICK[1:]]])
def test_quiet_prints_results_only(arguments: list[str], tmp_path: Path) -> None:
    done = fedsign(*arguments, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "accuracy" in done.stdout and "report.html" in done.stdout


def test_json_lines_hold_the_progress_as_numbers(tmp_path: Path) -> None:
    done = fedsign(*QUICK, "--log-json", "--log-every=0", folder=tmp_path)
    first, *rounds = map(json.loads, done.stderr.splitlines())
    (run,) = (tmp_path / "runs" / "digits-fedavg").iterdir()
    assert first["message"] == f"run {run.relative_to(tmp_path)}" and first["level"] == "info"
    recorded = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for line, record in zip(rounds, recorded, strict=True):
        assert (line["unit"], line["done"], line["total"]) == ("round", record["round"], 3)
        assert (line["accuracy"], line["loss"]) == (record["accuracy"], record["loss"])
    assert [line["seconds_left"] is None for line in rounds] == [False, False, True]


def test_errors_and_warnings_are_json_too(tmp_path: Path) -> None:
    done = fedsign("--log-json", "run", "--set", "data.normalise=unit", "--set", "rounds=-1", folder=tmp_path)
    warning, error = map(json.loads, done.stderr.splitlines())
    assert (warning["level"], error["level"]) == ("warning", "error")
    assert "data.normalize" in warning["message"] and "rounds" in error["message"]
    assert done.returncode == 2


def test_verbose_prints_every_round_and_what_is_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what Rich takes for a terminal: no bar there either
    lines = fedsign(*QUICK, "--verbose", folder=tmp_path).stderr.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("round")] == [f"round {n}/3" for n in (1, 2, 3)]
    assert "engine in_process, device cpu, clients trained by path" in lines[0]


def test_the_interval_comes_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIGN_LOG_EVERY", "0")
    assert len(fedsign(*QUICK, folder=tmp_path).stderr.splitlines()) == 4


def test_quiet_and_verbose_exclude_each_other(tmp_path: Path) -> None:
    done = fedsign("-q", "runs", "-v", folder=tmp_path)
    assert (done.returncode, done.stderr) == (
        2, "Error: --quiet and --verbose were both given; expected one of them.\n",
    )  # fmt: skip


def test_the_nearest_command_is_named_once() -> None:
    for words, nearest in ((["data", "chek"], "'check'"), (["reprot"], "'report'")):
        output = CliRunner().invoke(app, words).output
        assert output.count("Did you mean") == 1 and nearest in output, output


def test_only_options_of_the_root_command_are_taken_from_behind_a_command() -> None:
    called = CliRunner().invoke(app, ["list", "engines", "--json", "-q"])
    assert called.exit_code == 0 and json.loads(called.stdout)
    # after -- there are arguments only
    assert "'--quiet' cannot be listed" in str(CliRunner().invoke(app, ["list", "--", "--quiet"]).exception)
    assert CliRunner().invoke(app, ["list", "--log-every"]).exit_code == 2


def test_a_narrow_terminal_without_colors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    done = fedsign(*QUICK, folder=tmp_path)
    assert "round   3/3" in done.stderr
    assert not re.search(r"\x1b\[[\d;]*[34]\d", done.stdout + done.stderr)  # 30-49 and 38;5: colors; bold is none
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", done.stderr)
    assert max(map(len, re.split(r"[\r\n]", shown))) <= 40
    page = fedsign("run", "--help", folder=tmp_path).stdout
    assert max(map(len, page.splitlines())) <= 50  # click's least width
    assert "--show-config" in page and "--log-every" in page


def test_a_command_that_takes_less_than_an_interval_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    for every_s, num in ((30.0, 0), (0.0, 2)):
        with LogLines(0, 2, unit="point", output=Output(every_s=every_s)) as lines:
            lines.show(1)
            lines.show(2)
        assert len(capsys.readouterr().err.splitlines()) == num
