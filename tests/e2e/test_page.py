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
    .filter((box) => box.width > 0);
  const found = {{
    innerWidth: frame.contentWindow.innerWidth,
    scrollWidth: inner.documentElement.scrollWidth,
    title: inner.title,
    sizes: shown.map((box) => [box.left, box.right, box.height]),
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
    for width, pictures in ((360, 3), (1200, 3)):
        found, console = look(folder, width, tmp_path / f"profile{width}")
        assert found["innerWidth"] == width  # the probe looks at what it says
        assert found["scrollWidth"] <= width
        assert console == ""
        assert found["loaded"] == []
        assert found["title"].startswith("trial")
        assert len(found["sizes"]) == pictures  # two charts and one of the two drawings of the clients
        assert all(left >= 0 and right <= width and height > 100 for left, right, height in found["sizes"])
