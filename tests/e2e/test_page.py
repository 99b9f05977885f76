"""report.html in a real browser: no error, no overflow on a phone, pictures that have a size.

A window of headless Chromium is about 500 px wide at least, so the page stands in an <iframe> of the
width to be tested.  A probe in the wrapper page, not in the report, writes what it finds into the
wrapper's own text, which `--dump-dom` prints.
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
<iframe id="page" style="width:{width}px;height:800px;border:0" src="report.html"></iframe>
<script>
const frame = document.getElementById("page");
frame.addEventListener("load", () => {{
  const inner = frame.contentDocument;
  const shown = [...inner.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect())
    .filter((box) => box.width > 0 && box.height > 20);
  const found = {{
    innerWidth: frame.contentWindow.innerWidth,
    scrollWidth: inner.documentElement.scrollWidth,
    title: inner.title,
    sizes: shown.map((box) => [box.left, box.right, box.height]),
    scrolls: [...inner.querySelectorAll(".scroll")].map((box) => [box.clientWidth, box.scrollWidth]),
    loaded: frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name),
  }};
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>"""


def look(folder: Path, width: int, profile: Path) -> tuple[dict[str, Any], str]:
    """What the probe found at a width, and what the page wrote to the console."""
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER.format(width=width), encoding="utf-8")
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
@pytest.mark.parametrize("name", runs())
def test_the_page_fits_a_phone_and_a_desk(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_report(a_run(folder, **runs()[name]))
    pictures = (
        3 if name == "no round" else 4
    )  # the metric, the loss, the traffic, one of the two drawings of the clients
    for width in (360, 1200):
        found, console = look(folder, width, tmp_path / f"profile{width}")
        assert found["innerWidth"] == width  # the probe looks at what it says
        assert found["scrollWidth"] <= width
        assert console == ""
        assert found["loaded"] == []
        assert found["title"].startswith("trial")
        assert len(found["sizes"]) == pictures
        assert all(left >= 0 and right <= width and height > 100 for left, right, height in found["sizes"])


@pytest.mark.needs("comparison")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
@pytest.mark.parametrize(
    "name", ["usual", "one seed", "eight by three", "diverged", "nothing finished", "hostile names"]
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
        assert "comparison" in found["title"]
        if name == "usual":  # differences, two of bars, four of curves, and one of the two drawings of the clients
            assert len(found["sizes"]) == 8
        assert all(left >= 0 and right <= width and height > 40 for left, right, height in found["sizes"])
        if name == "eight by three" and width == 360:
            assert any(content > box for box, content in found["scrolls"])  # wide tables scroll in a box of their own
        if name == "usual" and width == 1200:
            assert all(content <= box for box, content in found["scrolls"])  # and need not on a desk


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
