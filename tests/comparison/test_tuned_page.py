"""docs/tuned.md matches the committed results, and its experiments are valid configurations."""

import json
from pathlib import Path

import pytest

from benchmarks.tuned import __main__ as tuned
from fedsign.config import load


def test_the_page_is_what_the_results_make() -> None:
    assert tuned.PAGE.read_text(encoding="utf-8") == tuned.page(), "run python -m benchmarks.tuned"


def test_failed_runs_and_runs_at_chance_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of MNIST's results as CIFAR-10's: the first entry lost a seed, and the second all; the first search lost all."""
    result = json.loads((tuned.RESULTS / "tuned-mnist-cnn.json").read_text(encoding="utf-8"))
    one, other = result["entries"][:2]
    one["values"][1] = None
    other |= {"values": [None] * 3, "mean": None, "std": None, "difference": None}
    for trial in result["trials"][:8]:
        trial |= {"validation_mean": None, "values": [None], "num_lost": 1}
    (tmp_path / "tuned-cifar10-cnn.json").write_text(json.dumps(result), encoding="utf-8")
    monkeypatch.setattr(tuned, "RESULTS", tmp_path)
    page = tuned.page()
    assert "Failed or diverged, excluded from the means: FedAvg, alpha 10, seed 1; FedProx, alpha 10, seed 0; " in page
    assert "At chance level, included in the means: FedPAN, alpha 0.5, seed 2 (10.22)." in page
    assert "5 of 6 searches kept the default settings (trial 1)." in page and "| 8 of 8 |" in page


@pytest.mark.parametrize(("name", "data"), zip(tuned.TITLES, ("mnist", "npz"), strict=True))
def test_an_experiment_is_a_configuration_of_its_name(name: str, data: str) -> None:
    config = load(tuned.RESULTS.parent / f"{name.removeprefix('tuned-')}.toml", [])
    assert config.name == name and config.data.name == data
