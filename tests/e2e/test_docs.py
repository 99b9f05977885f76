"""The commands in the documentation work."""

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from fedsign import plugins
from fedsign.config import load
from fedsign.errors import ConfigError
from fedsign.registry import KINDS
from simulations.api import run
from tests.e2e import commands
from tests.e2e.command import fedsign, settings
from tests.without.deletion import anchors

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PAGE = {".md", ".ipynb"}
QUICK = settings(rounds=1, partition__num_clients=4, partition__alpha=1.0, server__cohort_size=2, callbacks=[])


def snippets(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def check_one_round(command: str, changes: list[str], root: Path) -> None:
    """Run `fedsign run --set ...` as a page has it, but for changes that make it one round with two replies."""
    words = shlex.split(command)
    overrides = [value for flag, value in pairwise(words) if flag == "--set"]
    assert len(words) == 2 + 2 * len(overrides), "the commands of the page consist of --set KEY=VALUE"
    config = load(overrides=[*overrides, *changes, f"results.root={root}"])
    (line,) = run(config).rounds
    assert line["num_replies"] == 2 and line["failures"] == []
    assert all(isinstance(line[name.rpartition(":")[2]], float) for name in ("loss", *config.metrics))


def test_the_tutorials_own_data_set_runs(tmp_path: Path) -> None:
    (source,) = [snippet for snippet in snippets("docs/tutorial.md", "python") if snippet.startswith("# mydata.py")]
    (tmp_path / "mydata.py").write_text(source, encoding="utf-8")
    done = fedsign("run", *QUICK, *settings(data__name="mydata:two_moons", data__num_samples=400), folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (source,) = snippets("README.md", "python")
    shortened = source.replace('"rounds": 20', '"rounds": 1, "callbacks": []')
    assert shortened != source
    exec(compile(shortened, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_links_between_the_documents_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    for target in targets:
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "docs/README.md").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*") if path.suffix in PAGE}
    assert pages - {"README.md"} <= named


EVERY_COMMAND = [command for page in commands.PAGES for command in commands.commands_of(page)]
RUNS = {command.text: command for command in EVERY_COMMAND if commands.is_short_run(command)}
AT_ONCE = {command.text: command for command in EVERY_COMMAND if commands.is_at_once(command)}
ONE_STEP = ["rounds=1", "callbacks=[]", "client.local_steps=1"]


@pytest.mark.parametrize("text", RUNS)
def test_a_run_of_the_documents_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first round, of one local step."""
    monkeypatch.chdir(tmp_path)
    commands.write_modules(RUNS[text].page, tmp_path)
    Path("secret").write_bytes(bytes(range(32)))
    try:
        config = load(overrides=[*RUNS[text].overrides, *ONE_STEP])
    except ConfigError as error:
        assert commands.DELETED in str(error), error
        return
    (line,) = run(config).rounds
    assert line["num_replies"] >= config.server.min_replies and line["loss"] > 0
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("text", AT_ONCE)
def test_a_command_of_the_documents_that_trains_nothing_runs(text: str, tmp_path: Path) -> None:
    done = fedsign(*shlex.split(text)[1:], folder=tmp_path)
    assert done.returncode == 0, done.stderr


ALGORITHMS = "docs/explanation/algorithms.md"


def section_of(name: str, page: str = ALGORITHMS) -> str:
    """The text under a heading, the case of which does not matter."""
    found = re.search(
        rf"^## {name}\n(.*?)(?=^## |\Z)", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL | re.I
    )
    assert found is not None, f"{page} has no heading '{name}'"
    return found[1]


@pytest.mark.parametrize("name", [name for name in KINDS["strategy"].table if not name.startswith("flower_")])
def test_an_algorithms_section_has_its_equation_and_its_settings_with_their_defaults(name: str) -> None:
    section = section_of(name)
    assert "```math" in section
    (line,) = re.findall(r"^- \*\*Settings\*\*: (.*?)(?=^- )", section, re.MULTILINE | re.DOTALL)
    for key, default in plugins.complete("strategy", name, {}, section="strategy").items():
        assert f"`{key} = {json.dumps(default)}`" in line
    for word in ("Communication", "Client state", "Differences", "Source", "Code"):
        assert f"**{word}**:" in section, word
    for path in re.findall(r"`((?:strategies|fedsign)/[\w/]+\.py)`", section):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("kind", "heading"), [("server_optimizer", "Server optimizers"), ("schedule", "Learning-rate schedules")]
)
def test_a_table_of_the_algorithms_page_has_every_row_with_its_defaults(kind: str, heading: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)$", section_of(heading), flags=re.MULTILINE))
    assert rows.keys() == KINDS[kind].table.keys()
    for name, row in rows.items():
        for key, default in plugins.complete(kind, name, {}, section=kind).items():
            assert f"`{key} = {json.dumps(default)}`" in row, (name, key)


PRIVACY = "docs/how-to/privacy-and-robustness.md"


@pytest.mark.needs("privacy")
def test_the_page_on_privacy_has_every_row_with_its_settings_and_their_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)$", (ROOT / PRIVACY).read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert rows.keys() == KINDS["privacy"].table.keys()
    for name, row in rows.items():
        for key in plugins.names_of("privacy", name):
            assert f"`{key}" in row, (name, key)
        required = dict.fromkeys({"clip_norm", "noise_multiplier", "delta"} & {*plugins.names_of("privacy", name)}, 0.5)
        for key, default in plugins.complete("privacy", name, required, section="privacy").items():
            assert key in required or f"`{key} = {json.dumps(default)}`" in row, (name, key)


@pytest.mark.needs("robustness")
def test_the_attack_of_the_how_to_runs(tmp_path: Path) -> None:
    (source,) = snippets(PRIVACY, "python")
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    done = fedsign("run", *QUICK, *settings(attack__name="mine:free_rider", attack__fraction=0.5), folder=tmp_path)
    assert done.returncode == 0, done.stderr
