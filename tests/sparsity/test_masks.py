"""Masks have the promised number of weights, and favor no position."""

from itertools import pairwise
from math import prod, sqrt
from typing import Any

import numpy as np
import pytest
import torch

from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.parameterization.apply import parameterized
from fedsign.parameterization.masks import Mask, mask_of
from fedsign.seeding import Purpose, named_words
from fedsign.workload import Workload

SHAPES = [(1, 1), (3, 5), (64, 48), (4, 2, 3, 3), (257, 129)]
DENSITIES = [1e-6, 1 / 64, 1 / 3, 0.5, 0.999, 1.0]


def exact(shape: tuple[int, ...], density: float, *, seed: int = 0, name: str = "w") -> Mask:
    return mask_of(seed, name, shape, density, draw="exact")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", DENSITIES)
def test_an_exact_mask_has_as_many_weights_as_its_density_says(shape: tuple[int, ...], density: float) -> None:
    for seed in range(5):
        mask = exact(shape, density, seed=seed)
        assert mask.is_present.shape == shape and mask.num == max(1, round(density * prod(shape)))
        assert torch.equal(mask.is_present, exact(shape, density, seed=seed).is_present)


def test_of_weights_that_drew_the_same_number_the_earlier_count() -> None:
    """They have 32 bits, so that of a million some are equal: densities are chosen to end between two of them."""
    size = 2**20
    drawn = named_words(0, Purpose.MASKS, "w", num=size)
    order = drawn.argsort(kind="stable")
    ends = np.flatnonzero(drawn[order][:-1] == drawn[order][1:])[:3]
    assert len(ends) == 3
    for end in ends:
        there = exact((size,), (end + 1) / size).is_present
        assert int(there.sum()) == end + 1 and there[order[end]] and not there[order[end + 1]]
        assert order[end] < order[end + 1]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_exact_mask_is_the_bernoulli_mask_with_the_fewest_weights_added_or_taken_away(
    shape: tuple[int, ...],
) -> None:
    for density in DENSITIES:
        for seed in range(5):
            one, other = exact(shape, density, seed=seed), mask_of(seed, "w", shape, density)
            changed = int((one.is_present ^ other.is_present).sum())
            assert changed == abs(one.num - other.num)


@pytest.mark.parametrize("draw", ["bernoulli", "exact"])
def test_masks_of_lower_densities_lie_in_those_of_higher_ones(draw: Any) -> None:
    masks = [mask_of(0, "w", (64, 48), density, draw=draw).is_present for density in DENSITIES]
    assert all(bool((few <= more).all()) for few, more in pairwise(masks))


def test_every_place_is_there_equally_often() -> None:
    """Over S masks with n of N places, p = n / N, the counts c_i have the covariance S p (1 - p) N / (N - 1) (I - 11' /
    N).

    So sum (c_i - S p)^2 (N - 1) / (N S p (1 - p)) is chi-square with N - 1 = 23 degrees of freedom, with a probability
    of 1e-4 below 6 and of 1e-4 above 57.  Places that took turns would give 0.
    """
    num_masks, size, num = 4000, 24, 6
    counts = np.zeros(size)
    for seed in range(num_masks):
        counts += exact((4, 6), num / size, seed=seed).is_present.flatten().numpy()
    share = num / size
    variance = num_masks * share * (1 - share) * size / (size - 1)
    assert counts.sum() == num_masks * num
    assert 6 < ((counts - num_masks * share) ** 2).sum() / variance < 57


def test_exact_masks_of_other_seeds_and_names_are_independent() -> None:
    """What two share is hypergeometric: mean n^2 / N, variance below n^2 / N."""
    shape, density = (300, 400), 1 / 16
    mask, expected = exact(shape, density, seed=3), 120_000 * density**2
    for other in (exact(shape, density, seed=4), exact(shape, density, seed=3, name="other")):
        assert abs(int((other.is_present & mask.is_present).sum()) - expected) < 5 * sqrt(expected)


BASE: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": [16, 32, 16]},
    "parameterization": {"name": "smupar", "base_width": 16, "density": 0.1, "densities": {"4.weight": 1 / 3}},
}


def test_a_configuration_says_how_masks_are_drawn_and_without_it_they_are_bernoulli() -> None:
    """51.2 and 170.7 of 512 weights each."""
    made = parameterized(Workload(from_dict({**BASE, "sparsity": {"draw": "exact"}})).make_model())
    assert made is not None and {name: mask.num for name, mask in made.masks.items()} == {
        "2.weight": 51,
        "4.weight": 171,
    }
    plain = from_dict(BASE)
    assert plain.sparsity.draw == "bernoulli"
    made = parameterized(Workload(plain).make_model())
    assert made is not None
    assert torch.equal(made.masks["2.weight"].is_present, mask_of(0, "2.weight", (32, 16), 0.1).is_present)


def test_a_draw_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sparsity\.draw='exakt' was given, but expected 'bernoulli' or 'exact'"):
        from_dict({**BASE, "sparsity": {"draw": "exakt"}})


def test_an_exact_draw_of_a_model_that_is_never_sparse_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sparsity\.draw=exact was given with parameterization\.name=none"):
        from_dict({**BASE, "parameterization": {"name": "none"}, "sparsity": {"draw": "exact"}})


@pytest.mark.parametrize("draw", ["bernoulli", "exact"])
def test_a_mask_keeps_at_least_one_weight_which_higher_densities_have_too(draw: Any) -> None:
    for seed in range(20):
        least, more = (mask_of(seed, "w", (12, 16), density, draw=draw) for density in (1e-4, 0.1))
        assert least.num == 1 < more.num and bool((least.is_present <= more.is_present).all())
        assert mask_of(seed, "w", (12, 16), 0.0, draw=draw).num == 0
