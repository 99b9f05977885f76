"""`fedsign ui`: the list, the overlay, a run's details, exports, and resuming, as the page asks for them."""

import shutil
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsign.storage.results import RunFolder, create
from simulations.ui.index import Index
from simulations.ui.listing import Listing
from tests.e2e.command import fedsign
from tests.ui.served import Served, served
from tests.unit.test_report import a_line

CONFIG = """name = "trial"
seed = {seed}
rounds = 40
metrics = ["accuracy"]
[data]
name = "digits"
[client]
lr = {lr}
[strategy]
name = "{strategy}"
"""


def make(
    root: Path, strategy: str = "fedavg", *, seed: int = 0, lr: float = 0.1, rounds: int = 8, **config: Any
) -> RunFolder:
    """A run whose accuracy in round n is n / 10, and that sends 1,500 bytes and takes 2 s a round."""
    text = CONFIG.format(seed=seed, lr=lr, strategy=strategy)
    partition = {"class_names": ["a", "b"], "counts": [[3, 1], [0, 6]]}
    folder = create(root, experiment="trial", seed=seed, config_toml=text, environment={}, partition=partition)
    for n in range(1, rounds + 1):
        folder.append("rounds.jsonl", a_line(n, accuracy=n / 10, loss=1 / n, num_clients=2))
        folder.append("timings.jsonl", {"round": n, "train_s": 1.5, "evaluate_s": 0.5})
    return folder


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / "runs", tmp_path / "comparisons"]


@pytest.fixture
def ui(roots: list[Path]) -> Iterator[Served]:
    """Three runs."""
    make(roots[0], "fedavg", lr=0.1)
    make(roots[0], "fedsign", seed=1, lr=0.05)
    make(roots[0], "fedsign", seed=2, lr=0.2, rounds=3)
    with served(roots) as ui:
        yield ui


def test_the_keys_of_chosen_runs_are_theirs_alone(ui: Served, roots: list[Path]) -> None:
    folder = make(roots[0], seed=3, rounds=0)
    folder.append("rounds.jsonl", {"round": 1, "balanced_accuracy": 0.5})
    ids = {row["facts"]["seed"]: row["id"] for row in ui.rows(columns="seed")}

    def entries(*seeds: int) -> dict[str, int]:
        keys = ui.get("/api/keys", ids=",".join(ids[seed] for seed in seeds))
        return {key["name"]: key["entries"] for key in keys if key["name"].endswith("accuracy")}

    assert entries(3) == {"last.balanced_accuracy": 1}
    both = entries(0, 3)
    assert both["last.accuracy"] == both["last.balanced_accuracy"] == 1 and entries(0, 1)["last.accuracy"] == 2
    assert set(entries()) >= set(both)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("", {0, 1, 2}),
        ("strategy.name=fedsign", {1, 2}),
        ("strategy.name!=fedsign", {0}),
        ("strategy.name~sign lr<0.1", {1}),  # the end of client.lr
        ("client.lr>=0.1", {0, 2}),
        ("last.accuracy>0.3", {0, 1}),  # means of 0.4 to 0.8, and of 0.1 to 0.3
        ("accuracy<0.21", {2}),  # the last one
        ("best.loss<0.2", {0, 1}),
        ("seed=2", {2}),
        ("fedavg", {0}),
        ("'strategy.name=fedsign' seed!=1", {2}),
        ("status=finished", set()),
    ],
)
def test_a_filter_selects_by_any_setting_or_metric(ui: Served, text: str, seeds: set[int]) -> None:
    rows = ui.rows(filter=text, columns="seed")
    assert {row["facts"]["seed"] for row in rows} == seeds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("strategy.nam=x", "Did you mean 'strategy.name'"),
        ("lr<fast", "give a number after <"),
        ("'open", "close it"),
        ("name=x", ""),  # a key of its own, though it is also the end of others
    ],
)
def test_a_filter_that_cannot_be_understood_is_a_sentence(ui: Served, text: str, said: str) -> None:
    answer = ui.client.get("/api/list", params={"filter": text})
    assert said in answer.text and answer.status_code == (400 if said else 200)


def test_the_list_is_sorted_by_any_key_and_runs_without_it_come_last(ui: Served, roots: list[Path]) -> None:
    (make(roots[0], seed=9).path / "rounds.jsonl").unlink()
    for ascending, expected in (("1", [2, 0, 1, 9]), ("", [1, 0, 2, 9])):
        rows = ui.rows(sort="accuracy", ascending=ascending, columns="seed,client.lr")
        values = [row["facts"]["seed"] for row in rows]
        assert values[-1] == 9 and values.index(2) == expected.index(2)
    assert [row["facts"]["client.lr"] for row in ui.rows(sort="client.lr", ascending="1", columns="client.lr")] == [
        0.05,
        0.1,
        0.1,
        0.2,
    ]


def test_a_run_that_goes_on_is_seen_as_it_is(ui: Served, roots: list[Path]) -> None:
    folder = make(roots[0], "feddyn", seed=5, rounds=1)
    with folder.locked():
        (row,) = ui.rows(filter="seed=5")
        assert (row["facts"]["status"], row["facts"]["done.rounds"]) == ("running", 1)
        folder.append("rounds.jsonl", a_line(2, accuracy=0.7, loss=0.5))
        (row,) = ui.rows(filter="seed=5", columns="best.accuracy")
        assert (row["facts"]["done.rounds"], row["facts"]["best.accuracy"]) == (2, 0.7)
        ui.get("/api/list")
    (row,) = ui.rows(filter="seed=5")
    assert row["facts"]["status"] == "unfinished"
    folder.conclude({"status": "finished"})
    folder.write_json("tags.json", {"tags": ["good", "paper"], "note": "the third try"})
    (row,) = ui.rows(filter="paper")
    assert (row["facts"]["status"], row["facts"]["note"]) == ("finished", "the third try")
    shutil.rmtree(folder.path)
    assert ui.rows(filter="seed!=77", columns="seed") and not ui.rows(filter="paper")


def test_an_index_that_grows_with_its_runs_equals_one_that_is_built_at_once(
    ui: Served, roots: list[Path], cache: Path
) -> None:
    """Appending, rewinding, and replacing records."""
    folder = make(roots[0], seed=5, rounds=4)
    ui.index.refresh()
    folder.append("rounds.jsonl", a_line(5, accuracy=0.9, loss=0.1))
    ui.index.refresh()
    folder.drop_after(2, "rounds.jsonl", "timings.jsonl")
    for n in range(3, 9):
        folder.append("rounds.jsonl", a_line(n, accuracy=0.3, loss=2.0))
    grown = [row["facts"] for row in ui.rows(columns=",".join(key["name"] for key in ui.get("/api/keys")))]
    for each in cache.glob("index-*"):
        each.unlink()
    with served(roots) as afresh:
        built = [row["facts"] for row in afresh.rows(columns=",".join(key["name"] for key in afresh.get("/api/keys")))]
    assert built == grown
    assert next(each for each in grown if each["seed"] == 5)["best.accuracy"] == 0.3


def test_a_damaged_index_is_built_again(ui: Served, roots: list[Path], cache: Path) -> None:
    (file,) = cache.glob("index-*.sqlite")
    with served(roots) as again:
        assert len(again.rows()) == 3
    for each in cache.glob("index-*"):
        each.write_bytes(b"not a database, but long enough to be read as one" * 100)
    with served(roots) as again:
        assert len(again.rows()) == 3
    assert file.read_bytes().startswith(b"SQLite")


def content_of(index: Index) -> list[Any]:
    """All that the index says of the runs."""
    index.refresh()
    with index.connect() as connection:
        listing = Listing(connection)
        rows = listing.rows(kind="run", sort="seed", columns=["strategy.name", "best.accuracy", "client.lr"])
        return [rows, listing.keys([])]


FOREIGN = "CREATE TABLE entries (id, signature); CREATE TABLE mine (x); INSERT INTO entries VALUES ('a', 'b')"


def damages(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """One flipped byte at a time, and files that are cut, empty, or another program's."""
    for at in range(0, len(whole), 50):
        yield f"byte {at}", whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :]
    for length in (0, 1, 15, 16, 100, 1024, 4096, len(whole) // 2, len(whole) - 1):
        yield f"cut to {length}", whole[:length]
    for value, other in ((b"fedprox", b"fedpr0x"), (struct.pack(">d", 1.1), struct.pack(">d", 1.2))):
        assert value in whole
        yield "a value in the table and in SQLite's index of it alike", whole.replace(value, other)
    yield "text", b"no database" * 1000
    with closing(sqlite3.connect(":memory:")) as foreign:
        foreign.executescript(FOREIGN)
        yield "another database", foreign.serialize()


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_an_index_with_any_damage_is_built_again(step: int, roots: list[Path], cache: Path) -> None:
    """A flipped byte in a text or a number breaks no structure of SQLite's, but would be shown."""
    for seed, strategy in enumerate(("fedavg", "fedsign", "fedprox")):
        make(roots[0], strategy, seed=seed, lr=0.1 + seed, rounds=2 + seed)
    expected = content_of(Index(roots, cache))
    (file,) = cache.glob("index-*.sqlite")
    whole = file.read_bytes()
    tried = [*damages(whole)]
    for what, content in (*tried[-14:], *tried[:-14:step]):
        for each in cache.glob("index-*"):
            each.unlink()
        file.write_bytes(content)
        assert content_of(Index(roots, cache)) == expected, what


def test_an_index_that_is_damaged_while_it_is_served_recovers_and_says_so(
    ui: Served, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = ui.get("/api/list")["rows"]
    (file,) = cache.glob("index-*.sqlite")
    for each in cache.glob("index-*"):
        each.write_bytes(bytes(len(each.read_bytes())))
    answer = ui.client.get("/api/list")
    assert answer.status_code == 400 and "it is checked: ask again" in answer.json()["error"]
    ends_at = time.monotonic() + 20
    while (answer := ui.client.get("/api/list")).status_code != 200 or len(answer.json()["rows"]) < 3:
        assert time.monotonic() < ends_at, answer.text
        time.sleep(0.05)
    assert answer.json()["rows"] == before
    assert f"{file}, was damaged" in caplog.text and "is built again" in caplog.text


def test_two_processes_read_new_runs_into_one_index(roots: list[Path], cache: Path) -> None:
    for seed in range(12):
        config = make(roots[0], seed=seed, rounds=1).path / "config.toml"
        config.write_text(CONFIG.format(seed=seed, lr=0.1, strategy=f'fedavg"\nown_{seed} = "'))  # without a seal
    indexes = [Index(roots, cache) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        assert [*threads.map(Index.refresh, indexes)] == [None, None]
    for index in indexes:
        with index.connect() as connection:
            assert {f"strategy.own_{seed}" for seed in range(12)} <= {
                key["name"] for key in Listing(connection).keys([])
            }


def test_curves_are_over_rounds_bytes_or_seconds(ui: Served) -> None:
    ids = ",".join(row["id"] for row in ui.rows(sort="seed", ascending="1"))
    over = {
        each: ui.get("/api/chart", ids=ids, key="accuracy", x=each)["chart"] for each in ("rounds", "bytes", "seconds")
    }
    eight = [*range(1, 9)]
    assert over["rounds"]["x"]["values"] == [eight, [1, 2, 3]]
    assert over["bytes"]["x"]["values"][0] == [1500 * n for n in eight]
    assert over["seconds"]["x"]["values"][0] == [2 * n for n in eight]
    assert over["bytes"]["series"][0]["y"] == [n / 10 for n in eight]
    smooth = ui.get("/api/chart", ids=ids, key="accuracy", smooth=2)["chart"]["series"][2]["y"]
    assert smooth == pytest.approx([0.1, 0.15, 0.25])
    log = ui.get("/api/chart", ids=ids, key="loss", logx=1, logy=1)["chart"]
    assert log["x"]["log"] and log["y"]["log"] and log["y"]["limits"] == [0.1, 1]


def test_labels_take_the_settings_that_tell_runs_apart_and_then_the_folders_name(tmp_path: Path) -> None:
    """Of four settings that differ, the last alone tells the first two runs apart; the last two are equal."""
    made = {"20260101-1": (8, "mlp"), "20260101-2": (8, "ours.networks.image:Network"), "20260101-3": (4, "mlp")}
    for name, (number, model) in (made | {"20260101-4": made["20260101-3"]}).items():
        folder = make(tmp_path / "runs", rounds=1)
        client = f"[client]\nbatch_size = {number}\nepochs = {number}\nlr = {number}\n"
        (folder.path / "config.toml").write_text(f'{client}[model]\nname = "{model}"\n[strategy]\nname = "fedavg"\n')
        folder.path.rename(folder.path.with_name(name))
    with served([tmp_path / "runs"]) as ui:
        names = {row["name"]: row["id"] for row in ui.rows()}
        labels = ui.get("/api/differences", ids=",".join(names[name] for name in sorted(names)))["labels"]
    assert labels == [
        "fedavg · batch_size 8 · epochs 8 · model mlp",
        "fedavg · batch_size 8 · epochs 8 · model ….networks.image:Network",
        "fedavg · batch_size 4 · epochs 4 · model mlp · 20260101-3",
        "fedavg · batch_size 4 · epochs 4 · model mlp · 20260101-4",
    ]


def test_runs_are_told_apart_by_the_settings_in_which_they_differ(ui: Served) -> None:
    ids = ",".join(row["id"] for row in ui.rows(sort="seed", ascending="1"))
    found = ui.get("/api/differences", ids=ids)
    assert found["settings"] == {
        "client.lr": [0.1, 0.05, 0.2],
        "seed": [0, 1, 2],
        "strategy.name": ["fedavg", "fedsign", "fedsign"],
    }
    assert found["labels"] == ["fedavg · seed 0 · lr 0.1", "fedsign · seed 1 · lr 0.05", "fedsign · seed 2 · lr 0.2"]


def test_an_answer_that_has_not_changed_is_empty(ui: Served, roots: list[Path]) -> None:
    first = ui.client.get("/api/list")
    again = ui.client.get("/api/list", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    make(roots[0], seed=5)
    ui.index.refresh()
    assert ui.client.get("/api/list", headers={"if-none-match": first.headers["etag"]}).status_code == 200


def test_clients_show_what_was_recorded_about_them(ui: Served, roots: list[Path]) -> None:
    """Client 0 has 3 a and 1 b: its accuracy is (3 x 0.8 + 1 x 0.4) / 4 = 0.7."""
    folder = make(roots[0], seed=5, rounds=3)
    (row,) = ui.rows(filter="seed=5")
    clients = ui.get(f"/api/run/{row['id']}")["clients"]
    assert [(each["client"], each["samples"], each["held"], each["rounds"]) for each in clients["rows"]] == [
        (1, 6, 1, 2),
        (0, 4, 2, 1),
    ]
    assert "clients.jsonl" in clients["missing"][0]
    folder.append(
        "clients.jsonl",
        {"round": 1, "clients": [0], "num_examples": [4], "train_loss": [0.5], "drift": [2.0], "class_accuracy": None},
    )
    folder.append(
        "clients.jsonl",
        {"round": 2, "clients": [1], "train_loss": [0.25], "drift": [1.0], "class_accuracy": [0.8, 0.4]},
    )
    folder.append("rounds.jsonl", a_line(4, failures=[{"client": 0, "reason": "crash"}]))
    clients = ui.get(f"/api/run/{row['id']}")["clients"]
    assert clients["missing"] == []
    first = {each["client"]: each for each in clients["rows"]}[0]
    assert (first["loss"], first["drift"], first["failures"]) == (0.5, 2.0, 1)
    assert first["accuracy"] == pytest.approx(0.7)
    # the mean of the last rounds; a class without test samples is left out, as on the run's page
    folder.append("clients.jsonl", {"round": 3, "clients": [], "class_accuracy": [0.6, None]})
    clients = ui.get(f"/api/run/{row['id']}")["clients"]
    assert {each["client"]: each["accuracy"] for each in clients["rows"]}[0] == pytest.approx((0.7 + 0.6) / 2)


def test_sites_members_findings_and_failures_are_shown(ui: Served, roots: list[Path]) -> None:
    folder = make(roots[0], seed=5, rounds=3)
    for n, accuracy in ((1, 0.2), (2, 0.6), (3, 0.5)):
        folder.append(
            "sites.jsonl", {"round": n, "sites": [{"name": "north", "client": 0, "accuracy": accuracy, "loss": 1.0}]}
        )
    folder.append("members.jsonl", {"round": 1, "site": "north", "event": "joined"})
    folder.append("failures.jsonl", {"round": 2, "partition": 1, "reason": "crash", "details": "a traceback"})
    finding = {"round": 0, "source": "data", "rule": "feature-scales", "message": "1e6 apart.", "remedy": "normalize."}
    folder.append("findings.jsonl", finding)
    (row,) = ui.rows(filter="seed=5 findings>0")
    assert (row["facts"]["done.findings"], row["facts"]["data"]) == (1, "digits")
    folder.append("findings.jsonl", finding)
    assert ui.rows(filter="seed=5")[0]["facts"]["done.findings"] == 2
    run = ui.get(f"/api/run/{row['id']}")
    (site,) = run["sites"]["rows"]
    assert (site["last"]["accuracy"], site["best"]["accuracy"]) == (0.5, 0.6)
    assert run["members"]["rows"][0]["event"] == "joined" and run["failures"]["rows"][0]["reason"] == "crash"
    assert run["findings"]["rows"][0]["remedy"] == "normalize."
    assert ui.get(f"/api/run/{row['id']}/sites", key="accuracy")["chart"]["series"][0]["y"] == [0.2, 0.6, 0.5]


def test_a_comparison_leads_to_its_cells(ui: Served, roots: list[Path]) -> None:
    from fedsign.storage.digests import sealed_json

    cell = make(roots[1] / "trial" / "cells", seed=5)
    cell.append("findings.jsonl", {"round": 1, "rule": "plateau", "message": "flat", "remedy": "raise lr"})
    plan = {"format": 2, "metric": "accuracy", "labels": {"fedavg": "FedAvg"}, "cells": [{}], "seeds": [5]}
    (roots[1] / "trial" / "comparison.json").write_text(sealed_json(plan))
    (row,) = ui.rows(kind="comparison")
    assert (row["facts"]["strategies"], row["facts"]["done.findings"]) == ("FedAvg", 1)
    (run,) = ui.rows(parent=row["id"])
    assert run["name"].endswith(cell.path.name)
    plan = ui.get(f"/api/run/{run['id']}/resume")
    assert plan["command"] == f"fedsign compare --resume {roots[1] / 'trial'}"


def test_a_view_is_exported_as_a_page_that_loads_nothing_and_as_pdf(ui: Served, tmp_path: Path) -> None:
    ids = ",".join(row["id"] for row in ui.rows())
    page = ui.client.get("/export/view.html", params={"ids": ids, "key": "accuracy,loss"})
    assert "attachment" in page.headers["content-disposition"]
    assert page.text.count('<div class="plot"') == 2 and "client.lr" in page.text
    assert '<link rel="stylesheet' not in page.text and "src=" not in page.text
    pdf = ui.client.get("/export/view.pdf", params={"ids": ids, "key": "accuracy,loss"})
    assert pdf.content.startswith(b"%PDF") and pdf.headers["content-type"] == "application/pdf"
    assert ui.client.get("/export/view.pdf", params={"ids": ""}).json()["error"] == "the view has no runs; select some."


def test_resuming_shows_the_command_and_the_code_that_it_would_import(ui: Served, roots: list[Path]) -> None:
    folder = make(roots[0], "mine:Strategy", seed=5)
    text = (folder.path / "config.toml").read_text().replace('["accuracy"]', '["accuracy", "my.metrics:top5"]')
    (folder.path / "config.toml").write_text(text[text.index("name = ") :])  # without its seal
    (row,) = ui.rows(filter="seed=5")
    plan = ui.get(f"/api/run/{row['id']}/resume")
    assert plan["modules"] == ["mine:Strategy", "my.metrics:top5"]
    assert plan["command"] == f"fedsign run --resume {folder.path}"


def test_a_killed_run_is_resumed_after_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--set",
        "partition.num_clients=4",
        "--set",
        "server.cohort_size=2",
        "--set",
        "results.checkpoint_every=1",
    ]
    assert fedsign("run", "--set", "rounds=2", *arguments, folder=tmp_path).returncode == 0
    (config,) = tmp_path.glob("runs/*/*/config.toml")
    folder = RunFolder(config.parent)
    before = (folder.path / "rounds.jsonl").read_bytes()
    folder.rewind(1)  # as if it had been killed in round 2
    shutil.rmtree(folder.checkpoints / "round-000002")
    (tmp_path / "json.py").write_text("raise SystemExit('a file of this folder was imported')")
    with served([tmp_path / "runs"]) as ui:
        (row,) = ui.rows()
        assert row["facts"]["status"] == "unfinished"
        plan = ui.get(f"/api/run/{row['id']}/resume")
        assert plan["command"].startswith("fedsign run --resume ./runs/") and plan["modules"] == []
        refused = ui.post(f"/api/run/{row['id']}/resume", {"digest": "of something else"})
        assert refused.status_code == 409 and not (folder.path / "outcome.json").exists()
        assert ui.post(f"/api/run/{row['id']}/resume", {"digest": plan["digest"]}).status_code == 200
        ends_at = time.monotonic() + 100
        while not (folder.path / "outcome.json").exists():
            assert time.monotonic() < ends_at, ui.get(f"/api/run/{row['id']}")["resume_failure"]
            time.sleep(0.1)
    assert (folder.path / "rounds.jsonl").read_bytes() == before


def test_the_command_prints_one_url_and_names_a_folder_that_is_missing(tmp_path: Path) -> None:
    done = fedsign("ui", "--root", "nowhere", folder=tmp_path)
    assert done.returncode == 2 and "nowhere was given, but there is no such folder" in done.stderr
    done = fedsign("ui", "--host", "no.such.host.invalid", folder=tmp_path)
    assert done.returncode == 2 and "cannot be used" in done.stderr
    code = "import sys; import simulations.cli; print({'uvicorn', 'starlette', 'torch'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
