"""`fedsign estimate memory`: table, numbers, figure, and one-sentence errors."""

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedsign.errors import ConfigError
from fedsign.memory.estimate import Setting, estimate
from fedsign.memory.methods import methods_of
from simulations.api import run
from simulations.cli import app
from simulations.memory.estimate import chart_of, of_named
from tests.training import low_models

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "estimate-memory.md"
TINY = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "vocab_size": 97,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return path


def said(*words: Any) -> str:
    done = CliRunner().invoke(app, ["estimate", "memory", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def numbers(*words: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words, "--json"))
    return found


def refused(*words: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["estimate", "memory", *map(str, words)], catch_exceptions=False)
    return str(caught.value)


def test_the_table_says_what_fits(tiny: Path) -> None:
    found = numbers("--model", tiny, "--tokens", 32, "--card", "1.5MB")
    fitting = {row["method"]: row["fits"] for row in found["methods"]}
    assert list(fitting) == ["full", "lora r128", "galore r128", "E+H", "E+H+2L", "E+H+4L"]
    assert fitting["E+H"] and not fitting["full"]
    text = said("--model", tiny, "--tokens", 32, "--card", "1.5MB")
    assert "does not fit" in text and "1.5MB" in text and "tiny, 1 x 32 tokens, bf16" in text


def test_a_measured_step_stands_beside_the_estimate(tiny: Path) -> None:
    words = ("--model", tiny, "--tokens", 32, "--batch", 2, "--dtype", "float32", "--methods", "full,E+H+2L")
    for row in numbers(*words, "--measure")["methods"]:
        assert row["measured"]["static_bytes"] == pytest.approx(row["static_bytes"], rel=0.03)
        assert row["measured"]["peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03)


def test_a_measured_step_takes_the_attention_that_was_asked_for(tiny: Path) -> None:
    """Its squares of the tokens are more than twice all else here, so that a fused kernel's step would be far below."""
    words = ("--model", tiny, "--tokens", 512, "--dtype", "float32", "--methods", "full", "--attention", "math")
    (row,) = numbers(*words, "--measure")["methods"]
    assert row["measured"]["peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03)


@pytest.mark.needs("images")
def test_without_a_choice_there_are_the_methods_that_the_model_can_take() -> None:
    """The nine blocks of a residual network hold convolutions, which are no matrices for GaLore to project."""
    found = numbers("--set", "model.name=resnet20", "--set", "data.flat=false", "--batch", 4)["methods"]
    assert [row["method"] for row in found] == ["full", "lora r128", "E+H", "E+H+2L", "E+H+4L"]


def test_the_picture_has_a_bar_for_every_method_and_the_cards_line(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    assert str(path) in said("--model", tiny, "--tokens", 32, "--card", "1.5MB", "--out", path)
    drawn = path.read_text(encoding="utf-8")
    assert all(f"{method}: " in drawn for method in ("full", "E+H+2L")) and ", too large" in drawn


def test_the_charts_parts_stand_on_each_other_up_to_the_peak(tiny: Path) -> None:
    setting = Setting(weights=torch.float32, gradients=torch.float32, states=torch.float32)
    work = of_named(str(tiny), batch=None, tokens=32, checkpoint=False)
    estimates = [estimate(work, method, setting) for method in methods_of(["full", "E+H"], rank=8)]
    rows = [replace(each, fits=each.method == "E+H") for each in estimates]
    chart = chart_of(rows, "any", 1_500_000)
    assert [series.name for series in chart.series] == ["weights", "optimizer", "gradients", "activations"]
    assert all(lower.x == upper.low for lower, upper in pairwise(chart.series))
    unit = {"kB": 1e3, "MB": 1e6}[chart.x.label]
    assert chart.series[-1].x == pytest.approx([row.largest.total_bytes / unit for row in rows])
    assert chart.rules == [(pytest.approx(1.5e6 / unit), "card of 1.5\u202fMB")]
    assert chart.y.categories == ["full", "E+H"]


def test_an_experiments_own_model_is_estimated_on_its_own_batches() -> None:
    """An MLP 64-128-128-10 in float32: four numbers for each weight."""
    found = numbers("--set", "model.name=mlp", "--set", "model.hidden=[128,128]", "--batch", 32)
    num = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
    rows = {row["method"]: row for row in found["methods"]}
    assert rows.keys() == {"full", "lora r128"} and "batches of 32" in found["title"]
    assert rows["full"]["static_bytes"] == 16 * num


@pytest.mark.parametrize(
    ("low_precision", "static"),
    [("master", 2 + 2 + 4 + 8), ("stochastic", 2 + 2 + 8), ("plain", 2 + 2 + 4)],
)
def test_an_experiment_in_bf16_counts_its_masters_and_the_type_of_its_moments(low_precision: str, static: int) -> None:
    """Bytes of weight, gradient, master, and two moments for each of 32 (64 + 1) + 3 x 32 (32 + 1) + 10 (32 + 1)."""
    model, choice = f"model.name={low_models.__name__}:network", f"client.low_precision={low_precision}"
    (row,) = numbers("--set", model, "--set", choice, "--methods", "full")["methods"]
    assert row["static_bytes"] == static * (32 * 65 + 3 * 32 * 33 + 10 * 33)


def test_several_devices_need_less_each(tiny: Path) -> None:
    (row,) = numbers("--model", tiny, "--tokens", 32, "--methods", "full", "--devices", 4)["methods"]
    assert len(row["peak_of_devices_bytes"]) == 4
    assert max(row["peak_of_devices_bytes"]) < row["peak_bytes"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "mistral7b"], "Did you mean 'mistral-7b'"),
        (["--methods", "lorra"], "Did you mean 'lora'"),
        (["--methods", ","], "names none"),
        (["--card", "24"], "24GiB"),
        (["--dtype", "fp32"], "--dtype fp32 was given"),
        (["--attention", "flash"], "fused, math"),
        (["--model", "gpt2-small", "--tokens", "2000"], "1024 positions"),
        (["--out", "memory.gif"], "ends in .svg, .pdf, .png"),
        (["--masters", "--state-dtype", "bf16"], "leave one of the two out"),
        (["--adamw", "foreach", "--masters"], "use --adamw fused"),
        (["--model", "gpt2-small", "--set", "seed=1"], "give one of the two"),
        (["--model", "gpt2-small", "--devices", "13"], "at most 12"),
        (["--model", "gpt2-small", "--devices", "2", "--measure"], "a step is measured on one device"),
        (["--set", "model.name=mlp", "--methods", "lisa"], "choose other --methods"),
        (["--set", "engine.precision=bf16"], "set engine.precision=float32"),
        (["--set", "model.name=mlp", "--tokens", "64"], "--set data.block_length=64"),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_a_sentence(words: list[str], expected: str) -> None:
    assert expected in refused(*words)


def commands() -> list[str]:
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^fedsign estimate .*", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "command", [commands()[0], *(pytest.param(command, marks=pytest.mark.slow) for command in commands()[1:])]
)
def test_the_commands_of_the_how_to_run(
    command: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand; MODEL_FOLDER and RUN_FOLDER are the reader's."""
    monkeypatch.chdir(tmp_path)
    if "RUN_FOLDER" in command:
        run_folder = run({"rounds": 1, "callbacks": [], "results": {"root": str(tmp_path)}}).path
        command = command.replace("RUN_FOLDER", str(run_folder))
    words = shlex.split(command.replace("MODEL_FOLDER", str(tiny.parent)), comments=True)[3:]
    assert "peak" in said(*words)


def test_the_how_to_runs_commands() -> None:
    assert len(commands()) >= 5
