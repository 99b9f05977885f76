"""Partitions are disjoint, cover all samples, and give every client its minimum."""

import re
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsign.data.base import IntArray, Samples
from fedsign.data.partition.dirichlet import _draw_counts, _fill_up, dirichlet
from fedsign.data.partition.iid import iid
from fedsign.errors import DataError


def samples(num: int, num_classes: int = 10) -> Samples:
    """`num` samples without features, labelled at random."""
    labels = np.random.default_rng(7).integers(num_classes, size=num)
    return Samples(features=torch.zeros(num, 0), targets=torch.from_numpy(labels))


def assert_disjoint_and_covering(parts: list[IntArray], num: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num))


@settings(max_examples=40, deadline=None)
@given(
    num_clients=st.integers(1, 12),
    minimum=st.integers(1, 4),
    spare=st.integers(0, 60),
    num_classes=st.integers(1, 6),
    alpha=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 100),
)
def test_dirichlet_parts_are_disjoint_cover_and_meet_the_minimum(
    num_clients: int, minimum: int, spare: int, num_classes: int, alpha: float, seed: int
) -> None:
    train = samples(num_clients * minimum + spare, num_classes)
    rng = np.random.default_rng(seed)
    parts = dirichlet(train, num_clients, rng, alpha=alpha, min_partition_size=minimum)
    assert len(parts) == num_clients
    assert_disjoint_and_covering(parts, len(train))
    assert min(len(part) for part in parts) >= minimum


@given(num_clients=st.integers(1, 50), spare=st.integers(0, 200), seed=st.integers(0, 100))
def test_iid_parts_are_disjoint_cover_and_differ_by_one_at_most(num_clients: int, spare: int, seed: int) -> None:
    train = samples(num_clients + spare)
    parts = iid(train, num_clients, np.random.default_rng(seed))
    sizes = [len(part) for part in parts]
    assert_disjoint_and_covering(parts, len(train))
    assert len(parts) == num_clients
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("partition", [dirichlet, iid])
def test_the_generator_alone_decides(partition) -> None:  # type: ignore[no-untyped-def]
    train = samples(500)
    first, again, other = (partition(train, 10, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("alpha", [1e-3, 0.1])
def test_a_hard_case_ends_in_time(alpha: float) -> None:
    """100 clients, 5,000 samples, minimum 10 of the 50 that a client has on average."""
    train, started_at = samples(5_000), time.monotonic()
    parts = dirichlet(train, 100, np.random.default_rng(0), alpha=alpha, min_partition_size=10)
    assert time.monotonic() - started_at < 10
    assert_disjoint_and_covering(parts, 5_000)
    assert min(len(part) for part in parts) >= 10


@pytest.mark.parametrize("alpha", [1e-6, 1e6])
def test_extreme_alphas_are_the_limits_of_the_law(alpha: float) -> None:
    """alpha -> 0: a class goes to one client as a whole.  alpha -> infinity: to all in equal shares."""
    sizes = np.full(10, 1_000)
    counts = _draw_counts(sizes, 4, alpha, 0, np.random.default_rng(0))
    assert (counts.sum(axis=1) == sizes).all()
    if alpha < 1:
        assert (counts.max(axis=1) == sizes).all()
    else:
        assert np.abs(counts - 250).max() <= 5


@given(
    counts=st.integers(1, 5).flatmap(
        lambda classes: st.integers(1, 8).flatmap(
            lambda clients: st.lists(
                st.lists(st.integers(0, 9), min_size=clients, max_size=clients), min_size=classes, max_size=classes
            )
        )
    ),
    share=st.floats(0, 1),
)
def test_filling_up_moves_exactly_what_is_lacking(counts: list[list[int]], share: float) -> None:
    """Receivers end at the minimum, donors keep it, and what is moved, sum |change| / 2, is the deficit."""
    before = np.array(counts)
    minimum = int(share * (before.sum() // before.shape[1]))  # as much as there is for all, at most
    after = _fill_up(before, minimum)
    sizes, filled = before.sum(axis=0), after.sum(axis=0)
    deficit = np.maximum(minimum - sizes, 0)
    assert (after.sum(axis=1) == before.sum(axis=1)).all(), "totals per class"
    assert (after >= 0).all()
    assert (filled >= minimum).all()
    assert (filled[deficit > 0] == minimum).all()
    assert (filled <= np.maximum(sizes, minimum)).all(), "nobody else gains"
    donors = filled < sizes
    assert (after[:, ~donors & (deficit == 0)] == before[:, ~donors & (deficit == 0)]).all()
    assert np.abs(after - before).sum() == 2 * deficit.sum()
    assert (np.array(counts) == before).all(), "the given counts are not changed"


def test_the_largest_client_gives_of_its_largest_class() -> None:
    """Client 2 lacks 3; client 0 (10 samples, 7 of class 1) gives all of them, and stays the largest."""
    counts = np.array([[3, 2, 0], [7, 2, 0]])
    assert _fill_up(counts, 3).tolist() == [[3, 2, 0], [4, 2, 3]]


def test_a_small_alpha_gives_a_client_few_classes() -> None:
    """20 clients, 10 classes of n = 200: a share is Beta(a, 19 a).  a = 100: mean 1/20, standard deviation
    0.005, so a client gets about 10 of every class.  a = 0.1: P(n p < 1) = P(p < 1/200), about
    (1/200)^0.1 / (0.1 B(0.1, 1.9)) = 0.59 / 0.915 = 0.64, so about 3.6 classes of 10."""
    train = samples(2_000)
    labels = train.targets.numpy()

    def mean_num_classes(alpha: float) -> float:
        parts = dirichlet(train, 20, np.random.default_rng(0), alpha=alpha)
        return float(np.mean([len(np.unique(labels[part])) for part in parts]))

    assert mean_num_classes(100.0) == 10.0
    assert 2.5 < mean_num_classes(0.1) < 5.0


def test_too_many_clients_are_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match=re.escape("num_clients=26") + ".*min_partition_size=4.* 104 .* 100;"):
        dirichlet(samples(100), 26, np.random.default_rng(0))
    assert len(dirichlet(samples(100), 25, np.random.default_rng(0))) == 25
    with pytest.raises(DataError, match=r"num_clients=101 .* 100 "):
        iid(samples(100), 101, np.random.default_rng(0))


def test_a_regression_has_no_label_skew() -> None:
    train = Samples(features=torch.zeros(100, 1), targets=torch.zeros(100))
    with pytest.raises(DataError, match="class labels"):
        dirichlet(train, 2, np.random.default_rng(0))
    assert_disjoint_and_covering(iid(train, 3, np.random.default_rng(0)), 100)
