"""The commands of the page on LISA work."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fedsign import plugins
from tests.e2e.command import fedsign
from tests.e2e.test_docs import QUICK, section_of, snippets

LISA = "docs/how-to/lisa.md"


@pytest.mark.parametrize(("name", "heading"), [("lisa", "Train in a federation"), ("galore", "Alternatives")])
def test_the_page_on_lisa_has_every_setting_with_its_default(name: str, heading: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section_of(heading, LISA), flags=re.MULTILINE))
    defaults = plugins.complete("optimizer", name, {}, section="client.optimizer")
    assert rows == {key: json.dumps(value) for key, value in defaults.items()}


@pytest.mark.slow
def test_the_page_on_lisa_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With fewer rounds and steps."""
    (experiment,), (program,) = snippets(LISA, "toml"), snippets(LISA, "python")
    shortened = experiment.replace("rounds = 30", "rounds = 1").replace("local_steps = 20", "local_steps = 2")
    assert shortened.count("= 1\n") == 1 and shortened.count("local_steps = 2\n") == 1
    (tmp_path / "lisa.toml").write_text(shortened, encoding="utf-8")
    blocks = [block.replace("\\\n", " ") for block in snippets(LISA, "bash")]
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        words = shlex.split(command)[1:]
        done = fedsign(*words, *([] if "lisa.toml" in words else QUICK), folder=tmp_path)
        assert done.returncode == 0, done.stderr
    exec(compile(program, LISA, "exec"), {})
    assert "blocks." in capsys.readouterr().out
