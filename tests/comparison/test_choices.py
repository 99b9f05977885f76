"""A comparison chooses settings on validation samples, for every strategy and partition."""

from pathlib import Path

import pytest

from benchmarks.compatibility import tree
from fedsign.comparison.over_seeds import summarize
from fedsign.comparison.summary import CellResult
from fedsign.config import from_dict
from fedsign.registry import KINDS
from simulations import run
from simulations.comparison.plan import make_plan
from simulations.comparison.request import Request

CHOOSING = [
    pytest.param(row, marks=[pytest.mark.slow] if row.startswith("flower_") else [])  # alike, and many
    for row in KINDS["strategy"].table
]


@pytest.mark.parametrize("row", CHOOSING)
def test_a_comparison_chooses_by_validation_samples(row: str, tmp_path: Path) -> None:
    """Of two learning rates, one of which hardly moves the model."""
    base = from_dict(tree(row, {"results": {"root": str(tmp_path)}}))
    request = Request(strategies=[row], seeds=[0], grid={"client.lr": [1e-4, 0.1]})
    plan, configs = make_plan(base, request, name="choice", environment={})
    done = [(cell, run(configs[cell.id])) for cell in plan.cells]
    results = [CellResult(cell=cell, is_finished=True, records=each.rounds, folder=each.path) for cell, each in done]
    trials = summarize(plan, tmp_path, results).trials
    figures = {trial.choice["client.lr"]: trial.validation_mean for trial in trials}
    assert figures == {cell.choice["client.lr"]: each.final("validation_accuracy") for cell, each in done}
    (chosen,) = [trial.choice["client.lr"] for trial in trials if trial.chosen]
    assert figures[chosen] == max(value for value in figures.values() if value is not None)
