"""report.html in a real browser: no errors, no overflow on a phone, charts that react and can be printed.

A window of headless Chromium is at least about 500 px wide, so the page is in an <iframe> of the tested width.  A probe
in the wrapper page, not in the report, writes its findings into the wrapper's own text, which `--dump-dom` prints.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedsign.report.page import write_report
from tests.unit.test_report import EDGES, a_line, a_run

pytestmark = pytest.mark.page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

WRAPPER = """<!doctype html><meta charset="utf-8"><body style="margin:0"><pre id="found">waiting</pre>
<iframe id="page" style="width:{width}px;height:800px;border:0" src="{page}"></iframe>
<script>
const frame = document.getElementById("page");
const pause = () => new Promise((done) => setTimeout(done, 100));
frame.addEventListener("load", async () => {{
  const inner = frame.contentDocument;
  await pause();
  const boxes = (selector) => [...inner.querySelectorAll(selector)].map((each) => each.getBoundingClientRect())
    .filter((box) => box.height > 0).map((box) => [box.left, box.right, box.height]);
  const found = {{
    innerWidth: frame.contentWindow.innerWidth,
    scrollWidth: inner.documentElement.scrollWidth,
    title: inner.title,
    plots: boxes(".plot"), drawn: boxes(".plot canvas"), static: boxes(".static"), others: boxes(".rows, .clients"),
    amounts: boxes(".rows .amount"),
    scrolls: [...inner.querySelectorAll(".scroll")].map((box) => [box.clientWidth, box.scrollWidth]),
    loaded: frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name),
  }};
  const figure = inner.querySelector(".plot canvas") && inner.querySelector(".plot").closest("figure");
  if (figure) {{
    const plot = figure.querySelector(".plot"), over = figure.querySelector(".u-over"), \
key = figure.querySelector(".key");
    const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", {{key, bubbles: true}}));
    const said = () => [figure.querySelector("output").textContent, \
...[...figure.querySelectorAll(".key b")].map((each) => each.textContent)];
    found.atFirst = said();
    const box = over.getBoundingClientRect();
    over.dispatchEvent(new MouseEvent("mouseenter", {{clientX: box.left, clientY: box.top + 9}}));
    over.dispatchEvent(new MouseEvent("mousemove", {{clientX: box.left, clientY: box.top + 9, bubbles: true}}));
    await pause();
    found.atLeft = said();
    found.movedBy = over.getBoundingClientRect().top - box.top;
    press("End"); press("ArrowLeft"); await pause();
    found.byKeys = said();
    key.click(); await pause();
    found.pressed = key.getAttribute("aria-pressed");
    found.label = plot.getAttribute("aria-label");
  }}
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>"""


def look(folder: Path, width: int, profile: Path, page: str = "report.html") -> tuple[dict[str, Any], str]:
    """What the probe found at a width, and what the page wrote to the console."""
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER.format(width=width, page=page), encoding="utf-8")
    command = [
        str(CHROMIUM),
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--disable-dev-shm-usage", "--allow-file-access-from-files", "--enable-logging=stderr"),
        *(f"--user-data-dir={profile}", "--window-size=1300,1000", "--virtual-time-budget=2000"),
        *("--dump-dom", wrapper.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None and match[1] != "waiting", f"the page did not load: {done.stderr[-2000:]}"
    console = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return json.loads(match[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")), console


def runs() -> dict[str, dict[str, Any]]:
    """A usual run with long names and a failure, and edges of the unit tests."""
    usual = {
        "rounds": [a_line(n, loss=3 / n, accuracy=1 - 1 / n) for n in range(1, 41)],
        "failures": [{"round": 2, "partition": 1, "reason": "longwordwithoutspace" * 20, "details": ""}],
        "outcome": {"status": "failed", "error": "/a/very/long/path" * 20},
        "class_names": ["T-shirt/top", "Ankle boot"],
        "counts": [[n % 7, 50 - n] for n in range(50)],
        "strategy": "some_package.some_module:SomeStrategyWithALongName",
    }
    edges = ("no round", "an exploding loss", "1000 clients", "100 classes", "regression")
    return {"usual": usual, **{name: EDGES[name] for name in edges}}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
@pytest.mark.parametrize(
    "name",
    [
        "usual",
        "regression",
        *(pytest.param(name, marks=pytest.mark.slow) for name in runs() if name not in ("usual", "regression")),
    ],
)
def test_the_page_fits_a_phone_and_a_desk(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_report(a_run(folder, **runs()[name]))
    num_plots = 2 if name == "no round" else 3  # the metric, the loss, the traffic
    for width in (360, 1200):
        found, console = look(folder, width, tmp_path / f"profile{width}")
        assert found["innerWidth"] == width  # the probe looks at what it says
        assert found["scrollWidth"] <= width
        assert console == ""
        assert found["loaded"] == []
        assert found.get("movedBy", 0) == 0  # the readout takes no room of its own
        assert found["title"].startswith("trial")
        assert len(found["plots"]) == len(found["drawn"]) == num_plots and len(found["others"]) == 1
        assert found["static"] == []  # it has made room for what the script draws
        boxes = [*found["plots"], *found["drawn"], *found["others"]]
        assert all(left >= 0 and right <= width and height > 100 for left, right, height in boxes)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
def test_a_chart_answers_the_pointer_and_the_keys(tmp_path: Path) -> None:
    """Accuracies 0.1, 0.2, 0.3: initially the last, at the left edge the first, one key to the left the second."""
    write_report(a_run(tmp_path, [a_line(n, accuracy=n / 10) for n in (1, 2, 3)]))
    found, console = look(tmp_path, 1200, tmp_path / "profile")
    assert console == ""
    assert [each.replace("\u202f", " ") for each in found["atFirst"]] == ["", "30.0 %"]
    assert [each.replace("\u202f", " ") for each in found["atLeft"]] == ["round 1", "10.0 %"]
    assert [each.replace("\u202f", " ") for each in found["byKeys"]] == ["round 2", "20.0 %"]
    assert found["pressed"] == "false"
    assert found["label"].replace("\u202f", " ") == "Test accuracy: test over 3 rounds, from 10.0 % to 30.0 %"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
def test_without_scripts_a_static_picture_shows(tmp_path: Path) -> None:
    """A script that was changed does not run, since the page's policy names the hash of ours."""
    page = write_report(a_run(tmp_path, [a_line(n) for n in (1, 2, 3)])).read_text(encoding="utf-8")
    (tmp_path / "changed.html").write_text(
        page.replace("<script>", "<script>document.title = 'changed';"), encoding="utf-8"
    )
    found, console = look(tmp_path, 360, tmp_path / "profile", "changed.html")
    assert "Content Security Policy" in console and found["title"].startswith("trial")
    assert found["drawn"] == [] and len(found["static"]) == len(found["plots"]) == 3
    assert all(left >= 0 and right <= 360 and height > 100 for left, right, height in found["static"])


@pytest.mark.needs("comparison")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
@pytest.mark.parametrize(
    "name",
    [
        "usual",
        "hostile names",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("one seed", "eight by three", "diverged", "nothing finished")
        ),
    ],
)
def test_the_page_of_a_comparison_fits_a_phone_and_a_desk(name: str, tmp_path: Path) -> None:
    from fedsign.comparison.report import write_comparison
    from tests.comparison.test_report_comparison import CASES
    from tests.unit.report_samples import a_comparison

    folder = tmp_path / "comparison"
    folder.mkdir()
    write_comparison(a_comparison(folder, **CASES[name]))
    for width in (360, 1200):
        found, console = look(folder, width, tmp_path / f"profile{width}")
        assert found["innerWidth"] == width
        assert found["scrollWidth"] <= width
        assert console == ""
        assert found["loaded"] == []
        assert found.get("movedBy", 0) == 0 or name == "hostile names"  # whose values break lines
        assert "comparison" in found["title"]
        if (
            name == "usual"
        ):  # four of curves and a profile; differences, two of bars, three of statistics, and the clients
            assert (len(found["drawn"]), len(found["others"])) == (5, 7)
        boxes = [*found["plots"], *found["drawn"], *found["others"]]
        assert all(left >= 0 and right <= width and height > 40 for left, right, height in boxes)
        if name in ("usual", "eight by three"):
            assert all(content <= box for box, content in found["scrolls"])  # no table is cut off


@pytest.mark.needs("ablation")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
def test_the_page_of_an_ablation_fits_a_phone_and_a_desk(tmp_path: Path) -> None:
    """Long headings of the differences must not push the values off the page."""
    from fedsign.ablation.page import write_page
    from simulations.ablation.execution import ablate
    from tests.ablation.test_ablate import SMALL

    small = {**SMALL, "rounds": 2}
    folder = tmp_path / "ablation"
    write_page(ablate("fedsign", small, seeds=2, controls=["own-sign", "init-3"], out=folder, workers=1))
    for width in (360, 1200):
        found, console = look(folder, width, tmp_path / f"profile{width}", "ablation.html")
        assert (found["innerWidth"], console) == (width, "")
        assert found["scrollWidth"] <= width
        assert all(left >= 0 and right <= width for left, right, _ in found["amounts"])


@pytest.mark.needs("bilevel")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
def test_the_page_of_a_condensation_fits_a_phone_and_a_desk(tmp_path: Path) -> None:
    """Ten images per class break into several lines."""
    from fedsign.bilevel.settings import load
    from simulations.bilevel.condensing import condense
    from tests.bilevel.test_condense import SMALL

    small = [each for each in SMALL if each != "--set"]
    condense(load(None, [*small, "images_per_class=10", "outer.steps=1"]), tmp_path)
    for width in (360, 1200):
        found, console = look(tmp_path, width, tmp_path / f"profile{width}", "condensation.html")
        assert (found["innerWidth"], console) == (width, "")
        assert found["scrollWidth"] <= width


@pytest.mark.needs("comparison")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
def test_the_page_of_a_comparison_prints(tmp_path: Path) -> None:
    """On paper nothing is hidden in a box that scrolls: the table's last column is among the words of the PDF."""
    from fedsign.comparison.report import write_comparison
    from tests.comparison.test_report_comparison import CASES
    from tests.unit.report_samples import a_comparison

    pdftotext = shutil.which("pdftotext")
    if pdftotext is None:
        pytest.skip("no pdftotext on the path")
    page, pdf = write_comparison(a_comparison(tmp_path, **CASES["diverged"])), tmp_path / "page.pdf"
    command = [str(CHROMIUM), *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={pdf}", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    text = subprocess.run([pdftotext, "-layout", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    assert "trouble" in text and "5 diverged" in text and "FedSign" in text
