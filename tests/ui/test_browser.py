"""`fedsign ui` in Debian's Chromium: runs are watched, overlaid, hovered, filtered, exported, killed, and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.e2e.command import settings
from tests.ui.browser import CHROMIUM, Tab, browser
from tests.ui.served import Served, served
from tests.ui.test_hostile import SCRIPT, with_config
from tests.ui.test_ui import make

pytestmark = [pytest.mark.page, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")]
SMALL = settings(partition__num_clients=4, server__cohort_size=2, results__checkpoint_every=1, callbacks=["report"])
DRAWN = "document.querySelectorAll('.plot canvas').length === 2"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Two runs of eight rounds."""
    monkeypatch.chdir(tmp_path)
    make(Path("runs"), "fedavg", seed=1, lr=0.1)
    make(Path("runs"), "fedsign", seed=2, lr=0.2)
    with served([Path("runs"), Path("comparisons")]) as ui:
        yield ui


def opened(tab: Tab, ui: Served) -> Tab:
    """The page, with its charts."""
    tab.open("about:blank")  # the page of another test has lost its server
    tab.wait("location.href === 'about:blank'")
    tab.console.clear()
    tab.show()
    tab.open(ui.opening_url)
    tab.wait(DRAWN)
    return tab


def test_a_run_is_watched_overlaid_hovered_filtered_exported_and_resumed(tab: Tab, ui: Served, tmp_path: Path) -> None:
    opened(tab, ui)
    assert tab.js("location.href") == f"{ui.url}/#runs?ids=" + tab.js("location.hash").partition("ids=")[2]
    assert "token" not in tab.js("location.href")

    # watched live
    command = [sys.executable, "-m", "simulations.cli", "run", *SMALL, *settings(rounds=2000, seed=3)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        tab.wait("document.querySelector('.status-dot.running')", 100)
        done = "+document.querySelector('tr:has(.running) td.number').textContent.match(/[0-9,]+/)[0].replace(',', '')"
        first = tab.wait(done)
        tab.wait(f"{done} > {first}")
        assert tab.js("document.querySelector('tr:has(.running) progress').max") == 2000
        # overlaid with another: the list is sorted by time, so the new run is first
        tab.js("document.querySelector('#clear').click()")
        tab.wait("document.querySelector('#overlay.is-empty')")
        for row, count in (("tr:has(.running)", "1 run"), ("#rows tr:last-child", "2 runs")):
            tab.move(f"{row} input", click=True)
            tab.wait(f"document.querySelector('#chosen').textContent === '{count}'")
            tab.wait(DRAWN)
        tab.wait("document.querySelectorAll('#chart-0 .key').length === 2")
        value = "document.querySelectorAll('#chart-1 .key b')[0].textContent"
        before = tab.wait(value)
        tab.wait(f"{value} !== '{before}'")
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    tab.wait("!document.querySelector('.status-dot.running')")

    # hovered: at the left edge is round 1, where the run of `make` has accuracy 0.1 and loss 1
    tab.move("#chart-1 .u-over", across=0.0)
    assert tab.wait("document.querySelector('#chart-1 output').textContent") == "round 1"
    assert "1.00" in tab.js("[...document.querySelectorAll('#chart-1 .key b')].map(e => e.textContent)")

    # axes and smoothing; kept in the address
    tab.js("document.querySelector('#logy').click()")
    tab.wait("location.hash.includes('logy=1')")
    tab.js("const x = document.querySelector('#x'); x.value = 'bytes'; x.dispatchEvent(new Event('change'))")
    tab.wait("document.querySelector('#chart-0 canvas') && location.hash.includes('x=bytes')")

    # filtered by what is typed
    tab.js("document.querySelector('#filter').focus()")
    tab.type("seed=3")
    tab.wait("document.querySelectorAll('#rows tr').length === 1")
    tab.wait("document.querySelector('#said').textContent === '1 run'")
    tab.js("document.querySelector('#filter').select()")
    tab.type("seeed=3")
    assert "Did you mean 'seed'" in tab.wait("document.querySelector('#filter-problem').textContent")
    tab.js("document.querySelector('#filter').select()")
    tab.type("seed=3")
    tab.wait("document.querySelector('#filter-problem').hidden")

    # exported
    page = ui.client.get(tab.wait("document.querySelector('#export-html').getAttribute('href')"))
    (tmp_path / "view.html").write_text(page.text)
    shown = tab.js("location.href")
    tab.open((tmp_path / "view.html").as_uri())
    tab.wait(DRAWN)
    assert tab.js("performance.getEntriesByType('resource').length") == 0
    assert ui.client.get(re.sub("html", "pdf", str(page.request.url), count=1)).content.startswith(b"%PDF")

    # resumed after asking, by the keyboard
    tab.open(shown)
    tab.wait("document.querySelector('#rows a')")
    tab.js("document.querySelector('#rows a').focus()")
    tab.press("Enter")
    tab.wait("document.querySelector('#resume')")
    tab.js("document.querySelector('#resume').focus()")
    tab.press("Enter")
    tab.wait("document.querySelector('dialog[open]')")
    command_shown = tab.js("document.querySelector('dialog code').textContent")
    (folder,) = (path.parent for path in Path("runs").glob("*/*-seed3/config.toml"))
    assert command_shown == f"fedsign run --resume ./{folder}"
    tab.press("Escape")
    tab.wait("!document.querySelector('dialog') && document.activeElement.id === 'resume'")
    assert not (folder / "outcome.json").exists()
    tab.press("Enter")
    tab.wait("document.querySelector('dialog[open]')")
    tab.js("document.querySelector('dialog .main').click()")
    tab.wait("document.querySelector('.status.running')", 100)
    os.kill(int((folder / "lock").read_text()), signal.SIGKILL)
    assert "exit code -9" in tab.wait("document.querySelector('.failure').textContent")
    assert [line for line in tab.console if "filter=seeed" not in line] == []  # which was refused


def test_the_page_of_a_run_without_findings_has_its_curves_and_configuration(tab: Tab, ui: Served) -> None:
    opened(tab, ui)
    tab.js(f"location.hash = '#run/{ui.rows()[0]['id']}'")
    tab.wait("document.querySelector('#run-head h1') && document.querySelector('#settings h2')")
    tab.wait(DRAWN)
    assert tab.js("document.querySelector('#findings').hidden && document.querySelector('#failures').hidden")
    assert (
        tab.js("document.querySelector('#run-problem').hidden")
        and tab.js("document.querySelector('#state').textContent") == ""
    )


def test_the_first_chart_is_of_a_metric_that_the_chosen_runs_have(tab: Tab, ui: Served) -> None:
    folder = make(Path("runs"), seed=5, rounds=0)
    for n in range(1, 9):
        folder.append("rounds.jsonl", {"round": n, "balanced_accuracy": n / 10, "loss": 1 / n})
    opened(tab, ui)
    (chosen,) = (row["id"] for row in ui.rows(filter="seed=5"))
    for view in (f"#run/{chosen}", f"#runs?ids={chosen}"):
        tab.js(f"location.hash = '{view}'")
        tab.wait("document.querySelector('#chart-0 select')?.value === 'balanced_accuracy'")
        tab.wait("document.querySelector('#chart-0 .key b').textContent.startsWith('80')")


def test_nothing_of_a_hostile_run_becomes_part_of_the_page(tab: Tab, ui: Served) -> None:
    folder = make(Path("runs"), seed=4)
    quoted = json.dumps(SCRIPT)
    with_config(folder.path, 'name = "fedavg"', f"name = {quoted}\n{quoted} = {quoted}")
    folder.write_json("tags.json", {"tags": [SCRIPT], "note": SCRIPT})
    folder.conclude({"status": SCRIPT, "error": SCRIPT})
    folder.write_json("partition.json", {"class_names": [SCRIPT], "counts": [[3], [4]]})
    for number in range(9, 15):
        folder.append("rounds.jsonl", {"round": number, SCRIPT: 0.5, "failures": [{"client": 0, "reason": SCRIPT}]})
    texts = {"round": 0, "source": SCRIPT, "rule": SCRIPT, "message": SCRIPT, "remedy": SCRIPT}
    folder.append("findings.jsonl", texts)
    folder.append("members.jsonl", {"round": 1, "site": SCRIPT, "event": SCRIPT, "why": SCRIPT})
    folder.append("failures.jsonl", {"round": 1, "partition": SCRIPT, "reason": SCRIPT})
    folder.append("sites.jsonl", {"round": 1, "sites": [{"name": SCRIPT, SCRIPT: 1.0}]})
    (folder.path / "report.html").write_text(f"<title>report</title>{SCRIPT}")
    folder.path.rename(folder.path.with_name(SCRIPT.replace("/", "")))
    ui.index.refresh()
    opened(tab, ui)
    tab.wait("document.querySelectorAll('#rows tr').length === 3")
    (row,) = ui.rows(filter="seed=4")
    query = urlencode({"columns": "strategy.name,tags", "keys": SCRIPT, "ids": row["id"]})
    tab.js(f"location.hash = '#runs?{query}'")
    tab.wait("document.querySelector('#rows').textContent.includes('onerror')")
    tab.js("document.querySelector('.menu').open = true")
    tab.wait("document.querySelector('.found label')")
    tab.js(f"location.hash = '#run/{row['id']}'")
    for part in ("#findings", "#members", "#failures", "#sites", "#clients"):
        tab.wait(f"document.querySelector('{part} h2')")
    tab.wait("document.querySelector('#chart-sites canvas')")
    assert tab.js("document.querySelectorAll('img, script:not([src]), [onerror]').length") == 0
    assert tab.js("document.title").endswith("FedSign")
    tab.open(f"{ui.url}/run/{row['id']}/report")
    tab.wait("document.title === 'report'")
    assert tab.js("document.title") == "report"  # its own script would have made it 1
    refused = [line for line in tab.console if "Content Security Policy" in line]
    assert refused and refused == tab.console  # the report's, which was refused


def test_the_page_fits_a_phone_a_desk_and_the_dark(tab: Tab, ui: Served) -> None:
    opened(tab, ui)
    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.js(paper)
    for width in (360, 1400):
        for view in ("#runs", "#comparisons", f"#run/{ui.rows()[0]['id']}"):
            tab.show(width, 800, dark=True, still=True)
            tab.js(f"location.hash = '{view}'")
            tab.wait("document.querySelector('#main').textContent.length > 20")
            tab.wait(DRAWN if view != "#comparisons" else "document.querySelector('#comparisons')")
            assert tab.js("document.documentElement.scrollWidth") <= width, (width, view)
    assert tab.js(paper) != light
    tab.js(
        "document.querySelector('.brand').insertAdjacentElement('afterend', Object.assign(document.createElement('i'), "
        "{className: 'status-dot running'}))"
    )
    running = "getComputedStyle(document.querySelector('.status-dot.running')).animationName"
    assert tab.js(running) == "none"
    tab.show()
    assert tab.js(running) == "pulse"
    assert tab.console == []


def test_every_control_has_a_name_and_can_be_reached_by_keys(tab: Tab, ui: Served) -> None:
    opened(tab, ui)
    tree = tab.send("Accessibility.getFullAXTree")["nodes"]
    controls = {"button", "link", "checkbox", "combobox", "searchbox", "slider", "textbox", "application", "region"}
    named = {}
    for node in tree:
        role = node.get("role", {}).get("value")
        if role in controls and not node.get("ignored"):
            name = node.get("name", {}).get("value", "")
            assert name, node
            named.setdefault(role, []).append(name)
    assert {"checkbox", "link", "button", "searchbox", "slider", "combobox", "application"} <= named.keys()
    roles = {node.get("role", {}).get("value") for node in tree}
    assert {"main", "navigation", "banner", "table", "columnheader", "rowheader"} <= roles
    focused = set()
    for _ in range(60):
        tab.press("Tab")
        focused.add(
            tab.js("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
        )
    assert {"skip", "brand", "clear", "x", "smooth", "logx", "filter", "plot is-live", "sort"} <= focused
    # sorting and choosing by keys keep the focus
    tab.js("document.querySelector('#rows input').focus()")
    tab.press(" ")
    tab.wait("document.querySelector('#chosen').textContent === '1 run'")
    tab.wait("document.activeElement.matches('#rows input')")
    tab.js("document.querySelectorAll('.sort')[1].focus()")
    tab.press("Enter")
    tab.wait("document.querySelectorAll('th')[2].ariaSort === 'descending'")
    # a chart answers to keys
    tab.js("document.querySelector('#chart-1 .plot').focus()")
    tab.press("End")
    tab.press("ArrowLeft")
    assert tab.wait("document.querySelector('#chart-1 output').textContent") == "round 7"
    assert tab.console == []
