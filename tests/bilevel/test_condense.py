"""`fedsign condense` from the command line: files, resuming, one-sentence errors."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fedsign.bilevel.condense import Condensation, Progress
from fedsign.bilevel.settings import from_dict, load
from fedsign.errors import ResultsError
from simulations.bilevel.condensing import condense, resume
from simulations.bilevel.page import FILES
from tests.e2e.command import fedsign, settings

SMALL = settings(
    outer__steps=4,
    outer__evaluate_every=2,
    outer__evaluations=1,
    outer__batch_size=64,
    inner__depth=5,
    network__hidden=[8],
)


def test_a_condensation_leaves_images_and_a_page(tmp_path: Path) -> None:
    done = fedsign("condense", *SMALL, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    folder = tmp_path / "condensations" / "condensed-digits"
    assert [line["step"] for line in told["lines"]] == [0, 1, 2, 3, 4]
    assert told["lines"][-1]["relative_variance"] is None or told["lines"][-1]["relative_variance"] > 0
    found = load_file(folder / "images.safetensors")
    assert found["images"].shape == (10, 1, 8, 8) and found["classes"].tolist() == list(range(10))
    assert float(found["images"].min()) >= 0 and float(found["images"].max()) <= 1
    assert not found["images"].equal(load_file(folder / "start.safetensors")["images"])
    page = (folder / "condensation.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 20
    with Image.open(folder / "images.png") as sheet:
        assert sheet.width > sheet.height


class _Stop(Exception):
    pass


def test_a_resumed_condensation_ends_in_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after step 3, with a checkpoint of step 2: the lines and the images are those of one that was not."""
    config = load(None, [each for each in SMALL if each != "--set"])

    take = Condensation.take

    def stop(self: Condensation, progress: Progress) -> dict[str, Any]:
        if progress.step == 3:
            raise _Stop
        return take(self, progress)

    condense(config, tmp_path / "whole")
    with monkeypatch.context() as patched, pytest.raises(_Stop):
        patched.setattr(Condensation, "take", stop)
        condense(config, tmp_path / "cut")
    assert len((tmp_path / "cut" / "steps.jsonl").read_text("utf-8").splitlines()) == 3  # 0, 1 and 2
    (cut, _), (whole, _) = (resume(tmp_path / name) for name in ("cut", "whole"))
    assert cut[-1]["accuracy"] == whole[-1]["accuracy"]
    for name in ("config.toml", "steps.jsonl", "images.safetensors"):
        content = (tmp_path / "cut" / name).read_bytes()
        assert content == (tmp_path / "whole" / name).read_bytes()
        flipped = bytearray(content)
        flipped[-9] ^= 1
        (tmp_path / "cut" / name).write_bytes(flipped)
        with pytest.raises(ResultsError, match="cannot be read"):
            resume(tmp_path / "cut")
        (tmp_path / "cut" / name).write_bytes(content)
    for name in FILES:  # of the page; files of the user, since they are not as they were written
        content = (tmp_path / "cut" / name).read_bytes()
        (tmp_path / "cut" / name).write_text("mine")
        with pytest.raises(ResultsError, match=f"{name} was changed since"):
            resume(tmp_path / "cut")
        assert (tmp_path / "cut" / name).read_text() == "mine"
        (tmp_path / "cut" / name).write_bytes(content)


def test_two_phases_and_soft_labels(tmp_path: Path) -> None:
    """The first phase's method, then the second's, from where the first one ended; the shares of classes move."""
    tree = {"first_phase": {"steps": 2}, "soft_labels": True, "inner": {"depth": 4}, "images_per_class": 2}
    outer = {"steps": 1, "evaluations": 1, "batch_size": 64}
    lines, _ = condense(from_dict({**tree, "outer": outer}), tmp_path / "two")
    assert [line.get("method") for line in lines] == [None, "hessian_free", "hessian_free", "fg2u"]
    shares = load_file(tmp_path / "two" / "images.safetensors")["classes"]
    assert shares.shape == (20, 10)
    torch.testing.assert_close(shares.sum(1), torch.ones(20))
    assert float(shares[0, 0]) != pytest.approx(0.99, abs=1e-6)


def test_a_folder_that_holds_something_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept", encoding="utf-8")
    with pytest.raises(ResultsError, match="holds something already"):
        condense(from_dict({}), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "method.name=fg3u"], "fg2u"),
        (["--set", "inner.dept=3"], "Did you mean 'depth'"),
        (["--set", "data.name=synthetic"], "expected images"),
        (
            ["--set", "network.kind=conv", "--set", "image_size=16", "--set", "network.num_blocks=4"],
            "network.num_blocks=4",
        ),
        (["--resume", "nowhere"], "holds no condensation"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = fedsign("condense", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


def test_the_how_to_is_right() -> None:
    """Its Python runs, and the settings of its commands are settings."""
    page = (Path(__file__).parents[2] / "docs/how-to/condense.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(source, "condense.md", "exec"), {})
    commands = [shlex.split(line) for line in re.findall(r"^fedsign condense.*", page, flags=re.MULTILINE)]
    assert len(commands) >= 5
    for words in commands:
        load(None, [word for before, word in pairwise(words) if before == "--set"])
