"""`fedsign analyze parameterization` and `coordinates`, from a configuration to tables, files and figures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedsign.errors import ConfigError
from simulations.cli import app
from tests.e2e.command import analyze, settings

BASE = settings(
    parameterization__name="smupar",
    parameterization__base_width=32,
    parameterization__init_std=0.25,
    parameterization__density=0.25,
    model__hidden=[64, 64, 64],
    client__lr=0.5,
    client__weight_decay=0.125,
    client__optimizer__name="adamw",
)


def refused(*words: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["analyze", *map(str, words)], catch_exceptions=False)
    return str(caught.value)


def test_the_table_says_what_every_tensor_got() -> None:
    """m_d = 64 / 32, m_rho = 1/4: hidden rates 0.5 / (2 x 1/4), starts 0.25 / sqrt(2 x 1/4)."""
    found = analyze("parameterization", *BASE)
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows["2.weight"]["rate"] == pytest.approx(1.0)
    assert rows["2.weight"]["init_std"] == pytest.approx(0.25 / 0.5**0.5)
    assert rows["2.weight"]["num_weights"] == pytest.approx(64 * 64 / 4, abs=5 * (64 * 64 * 3 / 16) ** 0.5)
    assert (rows["0.weight"]["rate"], rows["0.weight"]["init_std"], rows["0.weight"]["num_weights"]) == (
        0.5,
        0.25,
        4096,
    )
    assert {row["weight_decay"] for name, row in rows.items() if name.endswith("weight")} == {0.125}
    assert {row["weight_decay"] for name, row in rows.items() if name.endswith("bias")} == {0.0}
    assert [(row["module"], row["factor"]) for row in found["passes"]] == [("0", 1.0), ("6", 0.5)]
    done = CliRunner().invoke(app, ["analyze", "parameterization", *BASE], catch_exceptions=False)
    assert "hidden, m_d 2, m_rho 0.25" in done.output and "reads off" in done.output


def test_an_exact_draw_is_seen_in_the_table_and_in_the_coordinate_check(tmp_path: Path) -> None:
    exact = (*BASE, *settings(sparsity__draw="exact"))
    rows = {row["name"]: row for row in analyze("parameterization", *exact)["tensors"]}
    assert rows["2.weight"]["num_weights"] == rows["4.weight"]["num_weights"] == 64 * 64 / 4
    words = ("--schemes", "smupar", "--densities", "1,0.25", "--seeds", 1, "--steps", 1, "--out", tmp_path)
    found, other = analyze("coordinates", *exact, *words), analyze("coordinates", *BASE, *words)
    assert found["facts"]["sparsity"] == {"name": "static", "draw": "exact"}
    (dense, sparse), (its_dense, its_sparse) = found["summary"], other["summary"]
    assert dense == its_dense and sparse["size_at_end"] != its_sparse["size_at_end"]


def test_the_coordinate_check_writes_numbers_and_a_picture(tmp_path: Path) -> None:
    """Behind one and two layers of density 1/4 activations are 1/2 and 1/4 as large, unless the start is corrected."""
    words = ("coordinates", *BASE, "--schemes", "sp,smupar", "--densities", "1,0.25", "--seeds", 2, "--steps", 2)
    found = analyze(*words, "--out", tmp_path)
    assert {Path(file).name for file in found["files"]} == {
        "coordinates.json",
        "coordinates.npz",
        *(f"coordinates-size.{format}" for format in ("svg", "pdf", "png")),
    }
    assert all(Path(file).stat().st_size > 500 for file in found["files"])
    with np.load(tmp_path / "coordinates.npz") as arrays:
        size, change = arrays["size"], arrays["change"]
    assert size.shape == change.shape == (2, 2, 2, 3, 2)  # schemes, densities, seeds, steps + 1, modules
    start = (size[:, 1, :, 0] / size[:, 0, :, 0]).mean(1)  # [schemes, modules], density 1/4 over 1
    assert start[0] == pytest.approx([0.5, 0.25], rel=0.25)
    assert start[1] == pytest.approx([1.0, 1.0], rel=0.25)
    assert not change[:, :, :, 0].any() and change[:, :, :, 1].all()
    dense = [row for row in found["summary"] if row["density"] == 1]
    assert all(row["start_low"] == row["end_high"] == row["change_low"] == 1 for row in dense)
    assert len(found["curves"]) == 2 * 2 * 3
    before = {file: Path(file).read_bytes() for file in found["files"]}
    analyze(*words, "--out", tmp_path)
    assert before == {file: Path(file).read_bytes() for file in found["files"]}


def test_what_cannot_be_looked_at_is_refused() -> None:
    assert "parameterization.name=none" in refused("parameterization")
    assert "parameterization.name=none" in refused("coordinates")
    assert "Did you mean 'smupar'" in refused("coordinates", *BASE, "--schemes", "smuparr")
    assert "--densities has 2" in refused("coordinates", *BASE, "--densities", "1,2")
    shallow = settings(model__hidden=[64])
    assert "no hidden layer to watch" in refused("coordinates", *BASE, *shallow, "--seeds", 1)


@pytest.mark.needs("partial")
def test_what_would_undo_a_parameterization_is_refused() -> None:
    assert "divides the model in its own way" in refused(
        "parameterization", *BASE, *settings(client__optimizer__name="galore")
    )
