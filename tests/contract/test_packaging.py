"""Everything in the packages is in git, and so in the wheel: hatchling leaves out what git ignores."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedsign", "strategies", "clients", "simulations", "tests", "docs")


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
def test_git_ignores_no_file_of_the_packages() -> None:
    files = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert len(files) > 200
    assert git("check-ignore", *files) == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
def test_a_folder_of_results_is_ignored() -> None:
    assert git("check-ignore", "runs/x", "comparisons/x", "mlruns/x") == ["runs/x", "comparisons/x", "mlruns/x"]
