"""The command line, as a user starts it."""

import json
import tomllib
from pathlib import Path

from tests.e2e.command import fedsign, settings

QUICK = settings(rounds=2, partition__num_clients=4, partition__alpha=1.0, server__cohort_size=2)


def test_a_run_prints_its_figures_and_leaves_results_and_a_report(tmp_path: Path) -> None:
    done = fedsign("run", *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "fedsign-digits").iterdir()
    assert str(run.relative_to(tmp_path)) in done.stdout
    assert "accuracy" in done.stdout
    assert "round   2/2" in done.stderr  # the progress bar
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 2
    header = (run / "config.toml").read_text(encoding="utf-8")
    assert "# torch: " in header and "# flwr: " in header


def test_the_written_configuration_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    assert fedsign("run", *QUICK, folder=tmp_path).returncode == 0
    (first,) = (tmp_path / "runs" / "fedsign-digits").iterdir()
    assert fedsign("run", str(first / "config.toml"), folder=tmp_path).returncode == 0
    (second,) = {*(tmp_path / "runs" / "fedsign-digits").iterdir()} - {first}
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
    assert (row["status"], row["rounds"], row["strategy"]) == ("finished", "2/2", "fedsign")


def test_report_writes_the_page_again(tmp_path: Path) -> None:
    assert fedsign("run", *QUICK, *settings(callbacks=[]), folder=tmp_path).returncode == 0
    (run,) = (tmp_path / "runs" / "fedsign-digits").iterdir()
    assert not (run / "report.html").exists()
    done = fedsign("report", str(run), folder=tmp_path)
    assert done.returncode == 0
    assert (run / "report.html").exists()


def test_resume_adds_rounds_but_refuses_another_experiment(tmp_path: Path) -> None:
    assert fedsign("run", *QUICK, folder=tmp_path).returncode == 0
    (run,) = (tmp_path / "runs" / "fedsign-digits").iterdir()
    assert fedsign("run", "--resume", str(run), *settings(rounds=3), folder=tmp_path).returncode == 0
    assert len((run / "rounds.jsonl").read_text().splitlines()) == 3
    refused = fedsign("run", "--resume", str(run), *settings(client__lr=0.5), folder=tmp_path)
    assert refused.returncode == 2
    assert "another 'client'" in refused.stderr


def test_doctor_finds_nothing_broken(tmp_path: Path) -> None:
    done = fedsign("doctor", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    states = {row["what"]: row["state"] for row in json.loads(done.stdout)}
    assert states["torchvision"] == "ok"
    assert states["engine superlink"] == "ok"


def test_list_names_the_tables_and_the_nearest_for_a_misspelt_one(tmp_path: Path) -> None:
    rows = json.loads(fedsign("list", "strategies", "--json", folder=tmp_path).stdout)
    assert {"fedavg", "feddyn", "fedsign"} <= {row["name"] for row in rows}
    wrong = fedsign("list", "strategy", folder=tmp_path)
    assert wrong.returncode == 2
    assert "Did you mean 'strategies'?" in wrong.stderr


def test_reproduce_lists_recipes_and_names_a_missing_one(tmp_path: Path) -> None:
    rows = json.loads(fedsign("reproduce", "--list", "--json", folder=tmp_path).stdout)
    assert {row["name"] for row in rows} >= {"fedsign-beats-fedavg-digits", "feddyn-fixed-point"}
    wrong = fedsign("reproduce", "feddyn-fixpoint", folder=tmp_path)
    assert wrong.returncode == 2
    assert "Did you mean 'feddyn-fixed-point'?" in wrong.stderr
