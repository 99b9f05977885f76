"""docs/how-to/sparse-clients.md: its experiment and all its commands, each made short."""

import shlex
import tomllib
from pathlib import Path

import pytest

from fedsign.config import from_dict
from tests.e2e.command import fedsign
from tests.e2e.test_docs import snippets

PAGE = "docs/how-to/sparse-clients.md"
EXPERIMENT, *CHANGES = snippets(PAGE, "toml")
COMMANDS = [line for block in snippets(PAGE, "bash") for line in block.splitlines() if line.startswith("fedsign ")]
SHORT = {
    "--values": "2^-9",
    "--steps": "1",
    "--seeds": "1",
    "--workers": "1",
    "--widths": "64,128",
    "--densities": "1,0.25",
}


def shortened(command: str) -> list[str]:
    """The same options, with less behind them."""
    words = shlex.split(command)[1:]
    return [SHORT.get(before, word) for before, word in zip(["", *words], words, strict=False)]


def test_the_page_shows_every_tool() -> None:
    shown = [" ".join(shlex.split(command)[1:4]) for command in COMMANDS]
    assert shown == [
        "analyze parameterization sparse.toml",
        "analyze coordinates sparse.toml",
        "tune transfer sparse.toml",
        "tune transfer sparse.toml",
    ]


@pytest.mark.needs("language")
@pytest.mark.parametrize("changes", CHANGES)
def test_what_the_page_changes_in_its_experiment_is_taken(changes: str) -> None:
    tree = tomllib.loads(EXPERIMENT)
    for section, values in tomllib.loads(changes).items():
        tree[section] = {**tree.get(section, {}), **values}
    if "sparsity" in tree:
        tree |= {"rounds": 1, "server": {"cohort_size": 1}}
    from_dict(tree)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_of_the_page_runs(command: str, tmp_path: Path) -> None:
    assert EXPERIMENT.startswith("# sparse.toml\n")
    smaller = EXPERIMENT.replace("width = 256", "width = 128").replace("num_heads = 8", "num_heads = 4")
    assert smaller != EXPERIMENT
    (tmp_path / "sparse.toml").write_text(smaller, encoding="utf-8")
    done = fedsign(*shortened(command), folder=tmp_path, timeout_s=300)
    assert done.returncode == 0, done.stderr
