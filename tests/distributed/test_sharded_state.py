"""Checkpoints of sharded trainings: bits survive a change of strategy or number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import on_ranks
from tests.distributed.resuming import begin, go_on, wrong_ones
from tests.distributed.training import Case

pytestmark = pytest.mark.slow

Values = list[tuple[dict[str, Any], dict[str, Any]]]
BEGUN = [Case(strategy="IIG"), Case(strategy="NII", freezes=True), Case(strategy="IIG", dtype=torch.bfloat16)]
FOLDERS = ["IIG-float64", "NII-float64", "IIG-bfloat16"]
SAME = ["IIG", "NNN", "GGG", "ING"]
OTHER = ["IIG", "NNI", "GGG"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def begun(folder: Path) -> list[Values]:
    return on_ranks(4, begin, BEGUN, folder, folder=folder / "begun")


def test_a_checkpoint_moves_between_strategies_without_a_change_in_any_bit(begun: list[Values], folder: Path) -> None:
    resumed = on_ranks(4, go_on, [Case(strategy=name) for name in SAME], folder / FOLDERS[0], folder=folder / "same")
    half, end = begun[0][0]
    for values in resumed:
        for name, (half_again, end_again) in zip(SAME, values, strict=True):
            for key, value in half.items():
                assert torch.equal(half_again[key], value), (name, key)
                # the same strategy adds in the same order
                tolerance = 0.0 if name == "IIG" else 1e-12
                torch.testing.assert_close(end_again[key], end[key], rtol=0, atol=tolerance)


def test_a_checkpoint_moves_to_other_ranks_without_a_change_in_any_bit(begun: list[Values], folder: Path) -> None:
    cases = [Case(strategy=name, per_group=3, freezes=True) for name in OTHER]
    resumed = on_ranks(6, go_on, cases, folder / FOLDERS[1], folder=folder / "other")
    half, end = begun[0][1]
    for values in resumed:
        for half_again, end_again in values:
            for key, value in half.items():
                assert torch.equal(half_again[key], value), key
                torch.testing.assert_close(end_again[key], end[key], rtol=0, atol=1e-12)


def test_in_bf16_masters_and_moments_go_on_with_the_same_bits(begun: list[Values], folder: Path) -> None:
    cases = [Case(strategy="IIG", dtype=torch.bfloat16)]
    resumed = on_ranks(4, go_on, cases, folder / FOLDERS[2], folder=folder / "halves")
    for before, after in zip(begun, resumed, strict=True):
        for first, second in zip(before[2], after[0], strict=True):
            assert all(torch.equal(second[key], value) for key, value in first.items())


def test_what_is_no_checkpoint_of_this_model_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for said in on_ranks(2, wrong_ones, tmp_path, folder=tmp_path / "said"):
        assert "is no checkpoint of a sharded training" in said[0]
        assert "has no model.bias, model.weight; load it into the model that it was saved from" in said[1]
