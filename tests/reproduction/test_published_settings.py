"""The settings of public code that our accuracies are compared with, and the prediction interval."""

from math import inf

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional

from fedsign.data.base import Samples
from simulations.recipes.algorithms.federated_learning_pytorch import Probability, beside, first_four_fifths
from simulations.recipes.algorithms.flower_niid_bench import balanced_dirichlet

LABELS = torch.arange(10).repeat(600)  # ten classes of 600: a shard of 30 for each of 100 clients holds one class


def shares(*, by_label: bool) -> list[list[int]]:
    train = Samples(features=torch.zeros(len(LABELS), 1), targets=LABELS)
    split = first_four_fifths(train, 100, np.random.default_rng(0), by_label=by_label)
    return [each.tolist() for each in split.indices]


def test_a_client_has_all_of_one_shard_and_three_fifths_of_the_other() -> None:
    dealt = shares(by_label=True)
    assert {len(each) for each in dealt} == {48}
    assert len({index for each in dealt for index in each}) == 4800
    counts = [sorted(np.unique(LABELS[each], return_counts=True)[1].tolist()) for each in dealt]
    assert all(each in ([18, 30], [48]) for each in counts) and [18, 30] in counts


def test_shuffled_shards_are_iid() -> None:
    dealt = shares(by_label=False)
    table = np.array([np.bincount(LABELS[each], minlength=10) for each in dealt])
    assert table.sum() == 4800 and stats.chi2_contingency(table).pvalue > 0.001


def test_the_loss_is_torchs_nll_of_probabilities() -> None:
    outputs, targets = torch.rand(7, 10).softmax(dim=1), torch.arange(7)
    assert Probability().loss(outputs, targets) == pytest.approx(functional.nll_loss(outputs, targets).item())


def test_a_run_like_ours_is_outside_of_the_interval_one_time_in_twenty() -> None:
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4000, 11))
    outside = [beside(each[0], each[1:].tolist())["off"] > 1 for each in draws]
    assert np.mean(outside) == pytest.approx(0.05, abs=0.012)
    assert beside(0.9, [0.8])["off"] == inf


def test_a_client_that_has_its_share_gets_no_more_of_the_next_class() -> None:
    train = Samples(features=torch.zeros(len(LABELS), 1), targets=LABELS)
    split = balanced_dirichlet(train, 10, np.random.default_rng(0), alpha=0.5)
    assert sorted(np.concatenate(split.indices).tolist()) == list(range(len(LABELS)))
    counts = np.array([np.bincount(LABELS[each], minlength=10) for each in split.indices])
    before = np.cumsum(counts, axis=1) - counts
    full = before >= len(LABELS) / 10
    assert full.any() and (counts[full] <= 1).all()  # cuts are rounded down, as there
