"""What the documents tell a reader to type works."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fedsign import plugins
from fedsign.config import load, parse_override
from fedsign.registry import KINDS
from simulations.comparison.plan import STRATEGIES, Request, make_plan, parse_axis
from simulations.comparison.play import is_for_all
from tests.e2e.command import fedsign, settings

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PAGE = {".md", ".ipynb"}
QUICK = settings(rounds=1, partition__num_clients=4, partition__alpha=1.0, server__cohort_size=2, callbacks=[])


def comparisons_in(page: str) -> list[str]:
    """The commands `fedsign compare ...` of a page that need no file of the reader's, each in one line."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(r"^fedsign compare --.*", text, flags=re.MULTILINE)
    return [each for each in found if "--resume" not in each and "mine:" not in each]


def snippets(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


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


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, spaces as hyphens, other punctuation dropped."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    named = set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "docs/README.md").read_text(encoding="utf-8")))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*") if path.suffix in PAGE}
    assert pages - {"README.md"} <= named


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_documents_exist(page: str) -> None:
    from tests.contract.test_cli_surface import surface

    known = {line.split()[1] for line in surface().splitlines() if line.startswith("fedsign ")}
    for command in re.findall(r"^fedsign (\w+)", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert command in known, command


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
    for word in ("Travels", "Stays at the client", "Differs", "Source", "Code"):
        assert f"**{word}**:" in section, word
    for path in re.findall(r"`((?:strategies|fedsign)/[\w/]+\.py)`", section):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("kind", "heading"), [("server_optimizer", "Server optimisers"), ("schedule", "Learning-rate schedules")]
)
def test_a_table_of_the_algorithms_page_has_every_row_with_its_defaults(kind: str, heading: str) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)$", section_of(heading), flags=re.MULTILINE))
    assert rows.keys() == KINDS[kind].table.keys()
    for name, row in rows.items():
        for key, default in plugins.complete(kind, name, {}, section=kind).items():
            assert f"`{key} = {json.dumps(default)}`" in row, (name, key)


PRIVACY = "docs/how-to/privacy-and-robustness.md"


def test_the_page_on_privacy_has_every_row_with_its_settings_and_their_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` (\|.*)$", (ROOT / PRIVACY).read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert rows.keys() == KINDS["privacy"].table.keys()
    for name, row in rows.items():
        for key in plugins.names_of("privacy", name):
            assert f"`{key}" in row, (name, key)
        required = dict.fromkeys({"clip_norm", "noise_multiplier", "delta"} & {*plugins.names_of("privacy", name)}, 0.5)
        for key, default in plugins.complete("privacy", name, required, section="privacy").items():
            assert key in required or f"`{key} = {json.dumps(default)}`" in row, (name, key)


def test_the_attack_of_the_how_to_runs(tmp_path: Path) -> None:
    (source,) = snippets(PRIVACY, "python")
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    done = fedsign("run", *QUICK, *settings(attack__name="mine:free_rider", attack__fraction=0.5), folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [each for page in PAGES for each in comparisons_in(page)],
    ids=lambda command: shlex.split(command, comments=True)[-1],
)
def test_a_comparison_in_the_documents_can_be_planned(command: str) -> None:
    """Without those that name a file of the reader's."""
    given: dict[str, list[str]] = {}
    words = shlex.split(command, comments=True)[2:]
    for option, value in zip(words[::2], words[1::2], strict=True):
        given.setdefault(option, []).append(value)
    settings_ = dict(map(parse_override, given.get("--set", [])))
    request = Request(
        strategies=given.get("--strategies", [",".join(STRATEGIES)])[0].split(","),
        seeds=tuple(range(int(given.get("--seeds", ["5"])[0]))),
        grid=dict(map(parse_axis, given.get("--grid", []))),
        by=dict(map(parse_axis, given.get("--by", []))),
        settings={key: value for key, value in settings_.items() if not is_for_all(key)},
    )
    base = load().replace(**{key: value for key, value in settings_.items() if is_for_all(key)})
    plan, _ = make_plan(base, request, name="planned", environment={})
    assert len(plan.cells) >= len(request.strategies) * len(request.seeds)


LISA = "docs/how-to/lisa.md"


@pytest.mark.parametrize(("name", "heading"), [("lisa", "In a federation"), ("galore", "Beside it")])
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


@pytest.mark.slow
def test_the_page_on_language_models_runs_from_the_base_to_the_exported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a shorter pretraining and fewer rounds, and without what is for a reader's own machine: `pip` and the recipe."""
    from fedsign.data.text import libraries as llm

    page = "docs/how-to/federated-llm.md"
    monkeypatch.chdir(tmp_path)
    make, use = snippets(page, "python")
    shortened = make.replace("steps=800", "steps=20")
    (experiment,) = snippets(page, "toml")
    assert shortened != make and "rounds = 10" in experiment
    exec(compile(shortened, page, "exec"), {"__name__": "__main__"})
    (tmp_path / "instructions.toml").write_text(experiment.replace("rounds = 10", "rounds = 1"), encoding="utf-8")
    commands = [line for block in snippets(page, "bash") for line in block.splitlines() if line.startswith("fedsign")]
    played = [command for command in commands if not command.startswith("fedsign reproduce")]
    assert [command.split()[1] for command in played] == ["run", "run", "export", "export"]
    for command in played:
        words = [word for each in shlex.split(command)[1:] for word in sorted(map(str, Path().glob(each))) or [each]]
        done = fedsign(*words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    llm.transformers("this test")  # which says how it is imported beside a torch without CUDA
    for folder in ("tuned", "tuned-lora"):
        capsys.readouterr()
        exec(compile(use.replace('"tuned"', f'"{folder}"'), page, "exec"), {})
        assert len(capsys.readouterr().out) > 10  # though so short a training leaves little to say but blank lines
