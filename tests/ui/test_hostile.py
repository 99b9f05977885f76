"""Folders and requests that mean harm: nothing of a run is executed, nothing outside of the root is read."""

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from simulations.ui.files import MAX_LINE
from simulations.ui.security import Guard
from simulations.ui.serving import application
from tests.ui.served import TOKEN, Served, served
from tests.ui.test_ui import make

SCRIPT = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
SECRET = "a secret of the user's"
EVIL = """import pathlib
pathlib.Path(__file__).with_name("executed").touch()
Strategy = None
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one good run; beside it, what must not be read."""
    (tmp_path / "outside").mkdir()
    for name in ("rounds.jsonl", "config.toml", "secret.txt", "outcome.json", "report.html"):
        (tmp_path / "outside" / name).write_text(SECRET)
    make(tmp_path / "runs", seed=1)
    return tmp_path / "runs"


def with_config(folder: Path, before: str, after: str) -> None:
    """Change a run's configuration, and drop its seal."""
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text[text.index("name = ") :].replace(before, after))


def link_of_a_file(folder: Path) -> None:
    (folder / "rounds.jsonl").unlink()
    (folder / "rounds.jsonl").symlink_to(folder.parents[2] / "outside" / "rounds.jsonl")


def link_of_an_outcome(folder: Path) -> None:
    (folder / "outcome.json").symlink_to("/proc/self/environ")


def pipe(folder: Path) -> None:
    (folder / "timings.jsonl").unlink()
    os.mkfifo(folder / "timings.jsonl")


def device(folder: Path) -> None:
    (folder / "tags.json").symlink_to("/dev/zero")


def cut_json(folder: Path) -> None:
    (folder / "outcome.json").write_text('{"status": "fini')


def deep_json(folder: Path) -> None:
    (folder / "tags.json").write_text('{"tags": ' + "[" * 100_000 + "]" * 100_000 + "}")


def cut_record(folder: Path) -> None:
    text = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join([*text[:3], text[3][:40] + "\n", *text[4:]]))


def changed_record(folder: Path) -> None:
    text = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(text.replace('"accuracy": 0.4', '"accuracy": 0.9'))


def records_of_other_types(folder: Path) -> None:
    with (folder / "timings.jsonl").open("w") as file:
        file.write("[1, 2]\n")


def bytes_that_are_no_text(folder: Path) -> None:
    (folder / "config.toml").write_bytes(b"\xff\xfe\x00name = 1")


def toml_that_is_none(folder: Path) -> None:
    (folder / "config.toml").write_text("name = [[[")


HARM: dict[Callable[[Path], None], str] = {
    link_of_a_file: "rounds.jsonl was skipped: it is a link",
    link_of_an_outcome: "outcome.json was skipped: it is a link",
    pipe: "timings.jsonl was skipped: it is not a regular file",
    device: "tags.json was skipped: it is a link",
    cut_json: "outcome.json is missing or damaged",
    deep_json: "tags.json is missing or damaged",
    cut_record: "rounds.jsonl is damaged",
    changed_record: "line 4: its digest does not match",
    records_of_other_types: "a line is not a JSON object",
    bytes_that_are_no_text: "config.toml is missing or damaged",
    toml_that_is_none: "config.toml is missing or damaged",
}


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_a_damaged_file_is_named_and_the_rest_works(root: Path, harm: Callable[[Path], None]) -> None:
    harm(make(root, seed=2).path)
    with served([root]) as ui:
        rows = ui.rows()
        assert len(rows) == 2
        (bad,) = [row for row in rows if row["notes"]]
        assert HARM[harm] in bad["notes"][0] and len(bad["notes"]) == 1
        run = ui.get(f"/api/run/{bad['id']}")
        chart = ui.get("/api/chart", ids=",".join(row["id"] for row in rows), key="accuracy")
        assert HARM[harm] in " ".join(run["problems"])
        assert max(len(each["y"]) for each in chart["chart"]["series"]) == 8  # the good run's
        assert SECRET not in json.dumps([rows, run, chart])


def test_links_to_folders_are_not_followed_and_one_sentence_says_so(root: Path) -> None:
    elsewhere = make(root.parent / "elsewhere", seed=7).path
    (root / "linked").symlink_to(elsewhere.parent)
    (root / "trial" / "linked-run").symlink_to(elsewhere)
    (root / "loop").symlink_to(root)
    with served([root]) as ui:
        (row,) = ui.rows(columns="seed")
        assert row["facts"]["seed"] == 1
        skipped = ui.get("/api/list")["index"]["skipped"]
        assert len(skipped) == 3 and all(text.endswith("was skipped: it is a link.") for text in skipped)
        # a folder that becomes a link after it was found
        (folder,) = root.glob("trial/2*")
        shutil.move(folder, root.parent / "moved")
        folder.symlink_to(root.parent / "outside")
        run = ui.get(f"/api/run/{row['id']}")
        assert SECRET not in json.dumps(run) and run["config"] == ""


def test_a_record_of_a_gigabyte_costs_no_memory(root: Path) -> None:
    """A hole of 1 GB in a line: read at most to the limit."""
    folder = make(root, seed=2).path
    with (folder / "rounds.jsonl").open("r+b") as file:
        file.seek(2**30, os.SEEK_END)
        file.write(b"\n")
    with served([root]) as ui:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (bad,) = [row for row in ui.rows(columns="done.rounds") if row["notes"]]
        assert "a record of over 4 MiB" in bad["notes"][0] and bad["facts"]["done.rounds"] == 8
        assert ui.get("/api/chart", ids=bad["id"], key="loss")["problems"]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 30 * MAX_LINE


def test_text_of_a_run_stays_text(root: Path) -> None:
    """The browser test shows that nothing of it runs; here, that it arrives and leaves as it is."""
    folder = make(root, seed=2)
    with_config(folder.path, 'name = "fedavg"', f"name = {json.dumps(SCRIPT)}")
    folder.write_json("tags.json", {"tags": [SCRIPT], "note": SCRIPT})
    folder.append("rounds.jsonl", {"round": 9, SCRIPT: 0.5, "accuracy": 0.5})
    folder.path.rename(folder.path.with_name(SCRIPT.replace("/", "")))
    with served([root]) as ui:
        ui.get("/api/keys")
        (row,) = ui.rows(filter="seed=2", columns="strategy.name,tags")
        assert row["facts"]["strategy.name"] == SCRIPT and row["facts"]["tags"].startswith("<img")
        page = ui.client.get("/export/view.html", params={"ids": row["id"], "key": f"loss,{SCRIPT}"}).text
        assert "<img" not in page and page.count("<script>") == 1  # that of the charts
        listed = ui.client.get("/api/list")
        assert listed.headers["content-type"] == "application/json"
        assert listed.headers["x-content-type-options"] == "nosniff"


def test_values_that_json_or_sqlite_lack_do_no_harm(root: Path) -> None:
    folder = make(root, seed=2).path
    odd_values = f"lr = {'9' * 4000}\nbig = inf\nodd = nan\nwhen = 2026-01-01\nlist = [[1], {{a = 1}}]"
    with_config(folder, "lr = 0.1", odd_values)
    with (folder / "timings.jsonl").open("w") as file:
        file.write('{"round": 1, "train_s": NaN, "x_s": "\\ud800", "\\ud800": 1e999, "y_s": [], "z_s": 1.5}\n')
    odd = folder.with_name(os.fsdecode(b"odd-\xff"))
    folder.rename(odd)
    with served([root]) as ui:
        (row,) = ui.rows(filter="seed=2", columns="client.lr,client.when,done.seconds")
        assert row["facts"]["done.seconds"] == 1.5 and row["facts"]["client.when"] == "2026-01-01"
        assert ui.get(f"/api/run/{row['id']}")["id"] == row["id"]
        ui.get("/api/differences", ids=",".join(each["id"] for each in ui.rows()))


@pytest.mark.parametrize("name", ["..", "../outside", "%2e%2e", "/etc", "x' OR 1=1 --", "0" * 16])
def test_only_known_ids_lead_to_a_folder(root: Path, name: str) -> None:
    with_config(make(root, seed=2).path, 'name = "trial"', 'name = ".."')
    with served([root]) as ui:
        assert len(ui.rows()) == 2
        for path in (f"/api/run/{name}", f"/run/{name}/report", f"/api/run/{name}/resume", f"/static/x/{name}"):
            answer = ui.client.get(path)
            assert answer.status_code in (400, 403, 404) and SECRET not in answer.text, path
        assert ui.get("/api/chart", ids=name, key="loss")["chart"]["series"] == []


def test_viewing_imports_nothing_that_a_run_names(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(root, "evil_module_of_a_run:Strategy", seed=2).path
    for place in (root.parent, folder):
        (place / "evil_module_of_a_run.py").write_text(EVIL)
    monkeypatch.chdir(root.parent)
    monkeypatch.syspath_prepend(str(root.parent))
    with served([root]) as ui:
        rows = ui.rows()
        ids = ",".join(row["id"] for row in rows)
        for path in ("/api/keys", "/api/list", f"/api/chart?ids={ids}&key=loss", f"/api/differences?ids={ids}"):
            ui.get(path)
        for row in rows:
            ui.get(f"/api/run/{row['id']}")
            ui.get(f"/api/run/{row['id']}/resume")
        assert ui.client.get("/export/view.pdf", params={"ids": ids, "key": "loss"}).status_code == 200
    assert "evil_module_of_a_run" not in sys.modules
    assert not [*root.parent.rglob("executed")]


def test_a_report_runs_no_script_but_ours(root: Path) -> None:
    folder = make(root, seed=2).path
    (folder / "report.html").write_text(f"<title>report</title>{SCRIPT}")
    with served([root]) as ui:
        (row,) = ui.rows(filter="seed=2")
        answer = ui.client.get(f"/run/{row['id']}/report")
        (policy,) = answer.headers.get_list("content-security-policy")
        assert "default-src 'none'" in policy and "sandbox allow-scripts;" in policy
        assert policy.count("script-src") == 1 and "script-src 'sha256-" in policy
        (folder / "report.html").unlink()
        (folder / "report.html").symlink_to(root.parent / "outside" / "report.html")
        assert SECRET not in ui.client.get(f"/run/{row['id']}/report").text
        assert not ui.get(f"/api/run/{row['id']}")["has_report"]


@pytest.fixture
def ui(root: Path) -> Iterator[Served]:
    with served([root]) as ui:
        yield ui


def test_without_the_token_there_is_nothing(ui: Served) -> None:
    with httpx.Client(base_url=ui.url, trust_env=False) as stranger:
        for path in ("/", "/static/app.js", "/api/list", "/api/keys", "/?token=", "/?token=wrong", f"/?token={TOKEN}x"):
            assert stranger.get(path).status_code == 403, path
        stranger.cookies.set(f"fedsign-ui-{ui.url.rpartition(':')[2]}", "wrong")
        assert stranger.get("/api/list").status_code == 403
        answer = stranger.get(f"/?token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie
        assert stranger.get("/api/list").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_a_name_that_was_pointed_here_is_refused(ui: Served, host: str) -> None:
    answer = ui.client.get("/api/list", headers={"host": host})
    assert answer.status_code == 400
    for own in ("localhost:1", "127.0.0.1", "[::1]:8000"):  # also behind a forwarded port
        assert ui.client.get("/api/list", headers={"host": own}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "file://"])
def test_a_page_of_another_site_is_refused(ui: Served, origin: str) -> None:
    assert ui.client.get("/api/list", headers={"origin": origin}).status_code == 403
    (row,) = ui.rows()
    assert ui.post(f"/api/run/{row['id']}/resume", {"digest": ""}, origin=origin).status_code == 403


def test_a_change_needs_post_and_the_token_in_a_header(ui: Served) -> None:
    (row,) = ui.rows()
    path = f"/api/run/{row['id']}/resume"
    digest = {"digest": ui.get(path)["digest"]}
    assert ui.client.post(path, json=digest, headers={"origin": ui.url}).status_code == 403
    assert ui.client.post(path, json=digest, headers={"x-fedsign-token": TOKEN}).status_code == 403
    assert ui.post(path, digest, **{"x-fedsign-token": "wrong"}).status_code == 403
    assert ui.post(path, {"digest": "x" * 10**6}).status_code == 413
    assert ui.post(path, []).status_code == 400
    for method in ("PUT", "DELETE", "PATCH"):
        answer = ui.client.request(
            method, path, headers={"origin": ui.url, "x-fedsign-token": TOKEN, "content-length": "0"}
        )
        assert answer.status_code == 405, method


def test_a_read_only_server_has_no_actions(root: Path) -> None:
    with served([root], is_read_only=True) as ui:
        (row,) = ui.rows()
        assert not ui.get(f"/api/run/{row['id']}")["can_resume"]
        assert TOKEN not in ui.client.get("/").text
        path = f"/api/run/{row['id']}/resume"
        assert ui.client.get(path).status_code == 404 and ui.post(path, {"digest": ""}).status_code == 404


def test_every_get_leaves_the_folders_as_they_are(ui: Served, root: Path) -> None:
    def files() -> dict[Path, Any]:
        return {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    before, (row,) = files(), ui.rows()
    for path in ("/", "/api/list", "/api/keys", f"/api/run/{row['id']}", f"/api/run/{row['id']}/resume"):
        assert ui.client.get(path).status_code == 200
    ui.client.get("/export/view.html", params={"ids": row["id"]})
    assert files() == before


def test_the_policy_allows_only_the_servers_own_files(ui: Served) -> None:
    answer = ui.client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src 'self'" in policy
    assert "<style" not in answer.text and "style=" not in answer.text and "<script>" not in answer.text


def test_with_a_host_for_all_any_address_but_no_strange_name_will_do(tmp_path: Path) -> None:
    app, _ = application([tmp_path], host="0.0.0.0", port=1, token=TOKEN, is_read_only=False)
    guard = Guard(app, host="0.0.0.0", port=1, token=TOKEN)
    assert guard._is_own_host("192.168.1.5") and guard._is_own_host("localhost")
    assert not guard._is_own_host("evil.example")
