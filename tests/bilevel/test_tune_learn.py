"""`fedsign tune learn`: the documented command, its files, and its errors."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fedsign.config import load
from tests.e2e.command import fedsign

PAGE = Path(__file__).parents[2] / "docs/how-to/learn-settings.md"
QUICK = ["--set", "model.hidden=[8]", "--set", "client.local_steps=2", "--steps", "2"]


def test_the_pages_command_writes_an_experiment_and_its_trajectory(tmp_path: Path) -> None:
    (line,) = re.findall(r"^fedsign (tune learn .*)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    done = fedsign(*shlex.split(line), *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "strategy.gamma" in done.stdout and "learned.toml" in done.stdout
    folder = tmp_path / "tuning" / "digits-fedsign-learned"
    assert {path.name for path in folder.iterdir()} >= {"learned.toml", "learned.json", "learned-trajectory.svg"}
    told = json.loads((folder / "learned.json").read_text("utf-8"))
    assert [row["step"] for row in told["curves"]] == [0, 1, 2]
    learned = load(folder / "learned.toml", [])
    assert learned.client.lr == told["summary"][1]["learned"] != load().client.lr


@pytest.mark.slow
def test_as_toml_it_is_an_experiment_alone(tmp_path: Path) -> None:
    words = ["client.lr", "--set", "data.validation_fraction=0.2", "--set", "rounds=1", "--toml"]
    done = fedsign("tune", "learn", *words, *QUICK, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "again.toml").write_text(done.stdout, encoding="utf-8")
    assert load(tmp_path / "again.toml", []).client.lr != load().client.lr


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    for words, said in (
        (["client.lr"], "data.validation_fraction=0 was given"),
        (["strategy.gam", "--set", "strategy.name=fedsign", "--set", "data.validation_fraction=0.2"], "strategy.gamma"),
        (["client.lr", "--set", "data.validation_fraction=0.2", "--method", "rgo"], "rgu"),
    ):
        done = fedsign("tune", "learn", *words, folder=tmp_path)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
