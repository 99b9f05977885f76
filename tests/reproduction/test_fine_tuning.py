"""Metrics that the recipes on fine-tuning compute from losses, on handmade losses."""

from math import nan

import pytest

from simulations.recipes.cells import best_settings
from simulations.recipes.lisa import lisa_training


def test_the_best_rate_has_the_lowest_loss_and_one_that_diverged_is_never_it() -> None:
    losses = {("full", 0.1): 2.0, ("full", 0.2): 1.5, ("full", 0.4): nan, ("lora", 0.1): nan, ("lora", 0.2): 3.0}
    assert best_settings(losses) == {"full": 0.2, "lora": 0.2}


def test_ratios_are_means_over_pairs_of_the_same_seed() -> None:
    metrics = lisa_training._metrics({"base": [4.0, 8.0], "full": [1.0, 4.0], "lora": [4.0, 2.0], "lisa": [2.0, 2.0]})
    assert metrics["lisa_over_full"] == pytest.approx((2.0 + 0.5) / 2)
    assert metrics["lisa_over_lora"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["lisa"] == 2.0
    assert metrics["share_of_gain"] == pytest.approx((2 / 3 + 6 / 4) / 2)
    assert metrics["lisa_minus_lora"] == pytest.approx(-1.0)


def test_lisa_that_trains_nothing_has_no_share_of_what_full_fine_tuning_gains() -> None:
    base = [3.0, 3.2]
    assert lisa_training._metrics({"base": base, "full": [2.8, 2.9], "lisa": base})["share_of_gain"] == 0.0
