"""Clients are exchangeable: an index says nothing about a client's size or classes.

In a block, one split, all orders of exchangeable values are equally likely, which Friedman's test checks over many
seeds.  The seeds and the level were fixed beforehand: a correct partition fails one row in 10,000.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsign.data.base import Samples
from fedsign.data.partition import dirichlet as module
from fedsign.data.partition.base import Split
from fedsign.data.partition.dirichlet import cut, dirichlet
from fedsign.data.partition.prefix import dirichlet_prefix, quantity_prefix
from fedsign.data.partition.quantity import quantity
from fedsign.data.partition.virtual import virtual

LEVEL = 1e-4
SEEDS = range(300)
SPREAD, SMALL = {"min_partition_size": 1}, {"min_partition_size": 8}  # of 10 samples on average: few draws suffice


def p_values(
    partition: Callable[..., Split], num_samples: int, num_clients: int, chosen: dict[str, Any]
) -> dict[str, float]:
    """Of the sizes, of their distances from the mean, of the numbers of classes, and of the largest class."""
    labels = np.random.default_rng(7).integers(10, size=num_samples)
    train = Samples(features=torch.zeros(num_samples, 0), targets=torch.from_numpy(labels))
    splits = [partition(train, num_clients, np.random.default_rng(seed), **chosen).indices for seed in SEEDS]
    counts = np.array(
        [[np.bincount(labels[part], minlength=10) for part in split] for split in splits]
    )  # [seeds, K, C]
    sizes = counts.sum(axis=2)
    facts = {
        "sizes": sizes,
        "distances": np.abs(sizes - sizes.mean(axis=1, keepdims=True)),
        "classes": (counts > 0).sum(axis=2),
        "largest class": counts.max(axis=2),
    }
    return {
        name: float(stats.friedmanchisquare(*found.T).pvalue)
        for name, found in facts.items()
        if (found != found[:, :1]).any()  # all clients alike: nothing to tell them apart by
    }


@pytest.mark.parametrize(
    ("partition", "num_samples", "chosen"),
    [
        (dirichlet, 600, {"alpha": 0.1, **SPREAD}),
        (dirichlet, 600, {"alpha": 1.0, **SPREAD}),
        (dirichlet, 120, {"alpha": 0.1, **SMALL}),
        (quantity, 600, {"alpha": 0.5, **SPREAD}),
        (quantity, 120, {"alpha": 0.1, **SMALL}),
        (quantity, 125, {"alpha": 1e4, **SPREAD}),
        (virtual, 600, {"alpha": 0.1, "max_samples": 30}),
    ],
)
def test_a_clients_index_says_nothing_about_its_size_or_classes(
    partition: Callable[..., Split], num_samples: int, chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every draw is rejected and clients are filled up: three draws are too few for 8 of 10 samples."""
    monkeypatch.setattr(module, "_MAX_DRAWS", 3)
    found = p_values(partition, num_samples, 12, chosen)
    assert len(found) >= 2 and min(found.values()) > LEVEL, found


@pytest.mark.parametrize(
    ("partition", "fact", "num_samples", "chosen"),
    [
        (dirichlet_prefix, "classes", 600, {"alpha": 0.1, **SPREAD}),
        (dirichlet_prefix, "classes", 120, {"alpha": 0.1, **SMALL}),
        (quantity_prefix, "sizes", 125, {"alpha": 1e4, **SPREAD}),
    ],
)
def test_the_same_test_finds_the_last_client_of_the_prefix_cut(
    partition: Callable[..., Split],
    fact: str,
    num_samples: int,
    chosen: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_DRAWS", 3)
    assert p_values(partition, num_samples, 12, chosen)[fact] < LEVEL


@settings(max_examples=100, deadline=None)
@given(
    num_clients=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=5),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 1_000),
)
def test_a_count_is_the_share_rounded_up_or_down_and_no_sample_is_left(
    num_clients: int, sizes: list[int], alpha: float, seed: int
) -> None:
    rng, class_sizes = np.random.default_rng(seed), np.array(sizes)
    shares = rng.dirichlet(np.full(num_clients, alpha), size=len(sizes))
    counts, exact = cut(shares, class_sizes, rng.random(len(sizes))), shares * class_sizes[:, None]
    assert (counts.sum(axis=1) == class_sizes).all() and (counts >= 0).all()
    assert np.abs(counts - exact).max() < 1 + 1e-9


def test_a_count_is_the_exact_share_on_average() -> None:
    """Rounded up with probability f = n p - floor(n p), a count has the variance f (1 - f): the mean of N cuts must lie
    within five standard errors sqrt(f (1 - f) / N)."""
    num, shares = 40_000, np.array([[0.003, 0.5, 0.0001, 0.29, 0.2069]])
    rng = np.random.default_rng(0)
    repeated: npt.NDArray[np.float64] = np.repeat(shares, num, axis=0)
    counts = cut(repeated, np.full(num, 137), rng.random(num))
    fraction = (shares[0] * 137) % 1
    assert (np.abs(counts.mean(axis=0) - shares[0] * 137) <= 5 * np.sqrt(fraction * (1 - fraction) / num) + 1e-9).all()
    assert not np.allclose(cut(shares, np.array([137]), np.zeros(1))[0], shares[0] * 137, atol=0.1), "without a start"
