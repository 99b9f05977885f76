"""docs/contributing: each walk-through is executed, word for word, in a copy of the repository.

A block with a title is a file: the whole of a new one, or, as `diff`, an edit.  A `bash` block is run in a shell; the
`text` block after it is its output.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from fedsign.report.wording import NARROW_SPACE
from tests.without.test_deletion import copy_of_the_sources

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/contributing").glob("*.md"))
NUMBER = re.compile(r"-?\d+\.\d+")
TIMING = re.compile(r"\d{8}-\d{6}|\d+\.\d+ ?s\b")  # of a run's folder, or seconds
ON_ONE_CORE = "-n 0 -p no:cacheprovider"


class Block(NamedTuple):
    """Of a page."""

    language: str
    title: str  # a file's path
    text: str


def blocks(page: str) -> list[Block]:
    """In their order."""
    fences = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', page, flags=re.MULTILINE | re.DOTALL)
    assert page.count("\n```") == 2 * len(fences), "a fence has neither a language nor a title that is understood"
    return [Block(*fence) for fence in fences]


def edit(text: str, diff: str) -> str:
    """A file's text after an edit, whose hunks are found by the lines that stay and go; `@@` stands between hunks."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines(keepends=True)]
        before, after = ("".join(line for mark, line in lines if mark != other) for other in "+-")
        assert text.count(before) == 1, f"these lines stand in the file {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    return text


def write(block: Block, copy: Path) -> None:
    """Write or edit the file that a block names."""
    path = copy / block.title
    if block.language == "diff":
        path.write_text(edit(path.read_text("utf-8"), block.text), "utf-8")
    else:
        assert not path.exists(), f"{block.title} is there already; show an edit"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, "utf-8")


def printed(commands: str, copy: Path) -> str:
    """What a shell prints, in which every command has to succeed."""
    own = {"PYTHONPATH": os.pathsep.join([str(copy), os.environ["PYTHONPATH"]]), "PYTEST_ADDOPTS": ON_ONE_CORE}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = ["bash", "-e", "-o", "pipefail", "-c", commands]
    done = subprocess.run(
        shell, cwd=copy, env={**os.environ, **own, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{commands}{done.stdout}{done.stderr}"
    return done.stdout


def check_output(found: str, shown: str) -> None:
    """Word for word, but for times; the last bits of a mean depend on the processor, so numbers may differ by 1 %."""
    found, shown = (TIMING.sub("...", each.replace(NARROW_SPACE, " ")) for each in (found, shown))
    assert NUMBER.sub("#", found) == NUMBER.sub("#", shown)
    assert list(map(float, NUMBER.findall(found))) == pytest.approx(list(map(float, NUMBER.findall(shown))), rel=0.01)


def follow(page: str, copy: Path) -> None:
    """Do what a page says."""
    out = ""
    for block in blocks(page):
        match block:
            case Block(title=str(title)) if title:
                write(block, copy)
            case Block(language="bash"):
                out = printed(block.text, copy)
            case Block(language="text"):
                check_output(out, block.text)
            case Block(language=language):
                assert language == "math"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_walkthrough_does_what_it_says(page: Path, tmp_path: Path) -> None:
    follow(page.read_text("utf-8"), copy_of_the_sources(tmp_path / "fedsign"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_edits_of_a_walkthrough_fit_the_repository(page: Path, tmp_path: Path) -> None:
    for block in filter(lambda block: block.title, blocks(page.read_text("utf-8"))):
        if block.language == "diff":
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / block.title, tmp_path / block.title)
        else:
            assert not (ROOT / block.title).exists(), f"{block.title} is in the repository already"
        write(block, tmp_path)


RIGHT = """
```python title="a/b.py"
x = 1
```

```diff title="a/b.py"
-x = 1
+x = 2.0
```

```bash
cat a/b.py
```

```text
x = 2.0
```
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("-x = 1", "-x = 3"),  # an edit of a line that is not there
        ("cat a/b.py", "cat a/b.py; false; true"),
        ("```text\nx = 2.0", "```text\nx = 2.1"),
        ("```text\nx = 2.0", "```text\ny = 2.0"),
        ("```text", "```console"),
        ("```text", "```text title=b.txt"),
    ],
)
def test_a_page_that_is_wrong_fails(right: str, wrong: str, tmp_path: Path) -> None:
    assert RIGHT.count(right) == 1
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    follow(RIGHT, tmp_path / "right")
    with pytest.raises(AssertionError):
        follow(RIGHT.replace(right, wrong), tmp_path / "wrong")
