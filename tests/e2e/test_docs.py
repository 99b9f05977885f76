"""What the documents tell a reader to type works."""

import re
from pathlib import Path

import pytest

from tests.e2e.command import fedsign, settings

ROOT = Path(__file__).parents[2]
QUICK = settings(rounds=1, partition__num_clients=4, partition__alpha=1.0, server__cohort_size=2, callbacks=[])


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


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_between_the_documents_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    for target in targets:
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_commands_in_the_documents_exist(page: str) -> None:
    from tests.contract.test_cli_surface import surface

    known = {line.split()[1] for line in surface().splitlines() if line.startswith("fedsign ")}
    for command in re.findall(r"^fedsign (\w+)", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert command in known, command
