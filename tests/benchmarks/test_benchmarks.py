"""The benchmarks' page matches the committed results, and the harness compares like with like."""

import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest
import torch

from benchmarks import docs, phases
from benchmarks.competitors import BARE, COMPETITORS, Competitor, competitor_named
from benchmarks.export import export
from benchmarks.measure import Record, dispersion, measure_all, measure_once, round_s, summarized
from benchmarks.tables import FORMER
from benchmarks.task import Task
from benchmarks.workloads import all_workloads
from fedsign.config import from_dict
from fedsign.former_names import current_record
from fedsign.workload import Workload

ROOT = Path(__file__).parents[2]
RESULTS = docs.result_files()
WORKS = all_workloads()
SMALL = replace(WORKS["w1"], experiment={**WORKS["w1"].experiment, "rounds": 3}, warm_up_rounds=1, min_accuracy=0.0)


def test_the_page_and_its_pictures_are_what_the_results_make() -> None:
    for path, text in docs.pages().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run python -m benchmarks.docs"
    for (
        path,
        chart,
    ) in docs.charts().items():  # drawn by any version of matplotlib, so the picture's text alternative counts
        assert escape(chart.description) in (ROOT / path).read_text(encoding="utf-8"), (
            f"{path}: run python -m benchmarks.docs"
        )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_when_on_what_and_how_often_it_was_measured(path: Path) -> None:
    result = current_record(json.loads(path.read_text(encoding="utf-8")), FORMER)
    assert result["date"] and result["repetitions"] >= 1
    assert {"torch", "flwr", "numpy", "python", "fedsign"} <= result["machine"]["versions"].keys()
    assert result["machine"]["processor"] and result["machine"]["cores"] >= 1 and "load_before" in result["machine"]
    for row in result.get("rows", []):
        assert "not_measured" in row or spreads_are_ordered(row)
    assert {row["competitor"] for row in result.get("rows", [])} <= {competitor.name for competitor in COMPETITORS}


def fabricated(**round_s: float) -> dict[str, Any]:
    """A result of W1 in which each competitor takes so long a round, and FedLab could not be installed."""
    titles = {competitor.name: competitor.title for competitor in COMPETITORS}
    rows = [
        {
            "competitor": name,
            "title": titles[name],
            **{key: dispersion([value]) for key in ("round_s", "mean_round_s", "first_round_s", "start_s")},
            "ratio_to_bare_loop": dispersion([value / round_s[BARE]]),
            "peak_mb": 100,
            "loss": 1.0,
            "accuracy": 0.9,
            "learned": True,
            "agrees": True,
            "same_every_time": None,
        }
        for name, value in round_s.items()
    ]
    rows.append(
        {"competitor": "fedlab", "title": titles["fedlab"], "not_measured": "cannot be installed: no such package"}
    )
    versions = {"python": "3", "fedsign": "0", "torch": "2", "flwr": "1", "numpy": "2"}
    machine = {"processor": "abacus", "cores": 2, "memory_gb": 1, "load_before": 3.0, "versions": versions}
    arithmetic = {"flops_per_round": 1e6, "flops_per_s": 1e9, "s_per_round": 1e-3}
    common = {"workload": "w1", "title": "W1", "about": "...", "curve": None, "device": "cpu", "date": "2030-01-01"}
    warm_up = {"repetitions": 1, "rounds": 5}
    return {**common, "repetitions": 1, "warm_up": warm_up, "machine": machine, "arithmetic": arithmetic, "rows": rows}


def test_the_page_shows_where_we_lose_who_was_not_measured_and_that_the_machine_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fabricated(bare_loop=0.004, floor=0.001, sequential=0.008, cohort=0.002, pfl_1=0.006)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "w1.json").write_text(json.dumps(result), encoding="utf-8")
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    page = docs.pages()["docs/benchmarks.md"]
    assert "we are 3.00 times as fast" in page, "6 ms over 2 ms"
    assert "Where we lose: ours, sequential is slower than pfl-research." in page
    assert "**FedLab, serial** was not measured: cannot be installed: no such package." in page
    assert "ours, cohort 2.00, ours, sequential 8.00" in page, "multiples of the floor"
    assert "preliminary" in page
    order = [page.index(f"| {title} |") for title in ("floor", "**ours, cohort**", "bare PyTorch loop", "pfl-research")]
    assert order == sorted(order), "the fastest first"


def spreads_are_ordered(row: dict[str, Any]) -> bool:
    found = [value for value in row.values() if isinstance(value, dict) and "median" in value]
    return bool(found) and all(each["lowest"] <= each["median"] <= each["highest"] for each in found)


OF_IMAGES = pytest.param("silo", marks=pytest.mark.needs("images"))


@pytest.mark.parametrize(
    "name", [name for name in WORKS if name != "silo" and "cpu" in WORKS[name].devices] + [OF_IMAGES]
)
def test_a_works_experiment_is_one(name: str) -> None:
    work = WORKS[name]
    config = from_dict(work.experiment)
    assert config.rounds > work.warm_up_rounds
    assert all(competitor_named(name) for name in work.competitors)


@pytest.mark.parametrize("name", ["w1", "w2", OF_IMAGES])
def test_the_plain_network_is_fedsigns_model(name: str, tmp_path: Path) -> None:
    work = WORKS[name]
    task = Task(export(work, tmp_path))
    model, network = Workload(from_dict(work.experiment)).make_model().eval(), task.make_network().eval()
    features = task.test[0][:4]
    with torch.no_grad():
        torch.testing.assert_close(network(features), model(features), rtol=1e-5, atol=1e-6)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == {"w1": 64 * 64 + 64 + 64 * 10 + 10, "w2": 1_626_442, "silo": 11_173_962}[name]


@pytest.mark.slow
def test_the_loop_the_floor_and_both_paths_of_ours_learn_the_same(tmp_path: Path) -> None:
    folder = export(SMALL, tmp_path)
    losses = {
        name: measure_once(competitor_named(name), folder, tmp_path, device="cpu")["loss"]
        for name in (BARE, "floor", "sequential", "cohort")
    }
    task = Task(folder)
    untrained, _ = task.evaluate(task.make_network())
    assert abs(losses[BARE] - untrained) > 0.005, "the loop has not moved"
    for name, loss in losses.items():
        assert math.isclose(loss, losses[BARE], rel_tol=1e-5), name


@pytest.mark.slow
def test_a_competitor_that_cannot_run_is_a_row_that_says_why(tmp_path: Path) -> None:
    folder = export(SMALL, tmp_path)
    broken = Competitor(name="broken", title="broken", module="ours", settings={"engine": {"nonesuch": 2}})
    refused = Competitor(name="refused", title="refused", module="ours", refused={SMALL.name: "it has no disk"})
    quick = {"device": "cpu", "repetitions": 1, "until": time.monotonic() + 600, "say": lambda text: None}
    rows = summarized(SMALL, measure_all(SMALL, [competitor_named(BARE), broken, refused], folder, tmp_path, **quick))
    assert rows[0]["ratio_to_bare_loop"]["median"] == 1.0
    assert "nonesuch" in rows[1]["not_measured"]
    assert rows[2]["not_measured"] == "it has no disk"


def test_a_ratio_is_of_neighbors_in_time() -> None:
    def measured(seconds: float) -> dict[str, Any]:
        last = {"loss": 1.0, "accuracy": 1.0, "start_s": 0.0, "peak_bytes": 0, "threads": 1, "versions": {}}
        return {"wall_s": [9.0, seconds, seconds], "cpu_s": [9.0, seconds, seconds], **last}

    bare = Record(competitor_named(BARE), runs=[measured(1.0), measured(10.0), measured(2.0)])
    other = Record(competitor_named("cohort"), runs=[measured(2.0), measured(10.0), measured(6.0)])
    row = summarized(SMALL, [bare, other])[1]
    assert round_s(SMALL, measured(1.0)) == 1.0, "the first round is left out"
    assert row["ratio_to_bare_loop"] == dispersion([2.0, 1.0, 3.0])
    assert row["ratio_to_bare_loop"]["median"] == statistics.median([2.0, 1.0, 3.0])


def test_time_belongs_to_the_innermost_frame_that_has_a_phase() -> None:
    root = str(ROOT)
    assert phases.phase_of(f"{root}/clients/batches.py", "batches") == "plan"
    assert phases.phase_of(f"{root}/clients/trainer.py", "train") == "training"
    assert phases.phase_of(f"{root}/fedsign/workload.py", "evaluate") == "evaluation"
    assert phases.phase_of(f"{root}/fedsign/seeding.py", "generator") is None, "all phases draw"
    assert phases.phase_of("/elsewhere/torch/nn/module.py", "forward") is None


STARTS = sorted({start for _, start, _ in phases.RULES})


@pytest.mark.parametrize(
    "folder",
    [pytest.param(start, marks=pytest.mark.needs("cohort") if "/cohort/" in start else ()) for start in STARTS],
)
def test_a_rule_names_a_file_that_is_there(folder: str) -> None:
    assert (ROOT / folder).exists()


@pytest.mark.slow
def test_a_profile_accounts_for_the_rounds(tmp_path: Path) -> None:
    found = measure_once(
        competitor_named("sequential"), export(SMALL, tmp_path), tmp_path, device="cpu", settings={"profile": 30}
    )
    profile, rounds = found["profile"], found["cpu_s"]
    assert set(profile) <= set(phases.PHASES) and profile["training"] > 0
    assert len(rounds) == 30
    assert 0.5 * statistics.fmean(rounds) < sum(profile.values()) < 1.5 * statistics.fmean(rounds)


@pytest.mark.slow
def test_the_command_knows_its_works_and_competitors() -> None:
    for wrong in (["--workloads", "w9"], ["--workloads", "w1", "--competitors", "nobody"]):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *wrong], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and "expected" in done.stderr
