"""Block draws are uniform, or have the inclusion probabilities of the weights: chi-square over seeded draws."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from fedsign.errors import ConfigError
from fedsign.optim.layer_draws import LayerSampler
from fedsign.seeding import Purpose, generator

NUM_DRAWS = 20_000
SMALLEST = 1e-3  # of the test's p-value: the seeds are fixed, so that a run that passes passes for ever


def draws(sampler: LayerSampler) -> list[tuple[int, ...]]:
    """As a client draws: a stream for each draw."""
    return [sampler.draw(generator(0, Purpose.LAYERS, round=index, partition=3)) for index in range(NUM_DRAWS)]


def p_value(counts: list[int], expected: list[float]) -> float:
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in zip(counts, expected, strict=True))
    return float(chi2.sf(statistic, len(counts) - 1))


@pytest.mark.parametrize(("num_blocks", "num_sampled"), [(6, 2), (8, 1), (5, 3)])
def test_every_set_of_blocks_is_as_likely_as_any_other(num_blocks: int, num_sampled: int) -> None:
    """Uniform over sets is more than uniform over blocks."""
    counts = Counter(draws(LayerSampler(num_blocks=num_blocks, num_sampled=num_sampled)))
    sets = list(combinations(range(num_blocks), num_sampled))
    assert counts.keys() <= set(sets)
    assert p_value([counts[each] for each in sets], [NUM_DRAWS / len(sets)] * len(sets)) > SMALLEST


def test_equal_weights_are_no_weights_in_distribution() -> None:
    counts = Counter(draws(LayerSampler(num_blocks=6, num_sampled=2, weights=(2.0,) * 6)))
    sets = list(combinations(range(6), 2))
    assert p_value([counts[each] for each in sets], [NUM_DRAWS / len(sets)] * len(sets)) > SMALLEST


WEIGHTED = [
    # (weights, blocks drawn, inclusion): in proportion to the weights, but never above 1
    ((1.0, 2.0, 3.0, 4.0), 1, (0.1, 0.2, 0.3, 0.4)),
    ((1.0, 2.0, 3.0, 4.0), 2, (0.2, 0.4, 0.6, 0.8)),
    ((8.0, 1.0, 1.0, 2.0), 2, (1.0, 0.25, 0.25, 0.5)),  # 16/12 is above 1: the others share one place as 1:1:2
    ((8.0, 5.0, 1.0, 1.0), 3, (1.0, 1.0, 0.5, 0.5)),  # 5 of 7 for two places is above 1, too
    ((0.0, 1.0, 1.0, 2.0), 1, (0.0, 0.25, 0.25, 0.5)),
    ((0.0, 1.0, 1.0, 2.0), 3, (0.0, 1.0, 1.0, 1.0)),
]


@pytest.mark.parametrize(("weights", "num_sampled", "inclusion"), WEIGHTED)
def test_a_blocks_inclusion_is_in_proportion_to_its_weight(
    weights: tuple[float, ...], num_sampled: int, inclusion: tuple[float, ...]
) -> None:
    """The count of a block with inclusion p is binomial: within 4 standard deviations of n p."""
    sampler = LayerSampler(num_blocks=4, num_sampled=num_sampled, weights=weights)
    np.testing.assert_allclose(sampler.inclusion(), inclusion, rtol=1e-12)
    found = draws(sampler)
    assert all(len(set(draw)) == num_sampled for draw in found)
    counts = Counter(block for draw in found for block in draw)
    for block, wanted in enumerate(inclusion):
        deviation = (NUM_DRAWS * wanted * (1 - wanted)) ** 0.5
        assert abs(counts[block] - NUM_DRAWS * wanted) <= 4 * deviation


@given(
    weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), share=st.floats(0, 1), seed=st.integers(0, 2**32)
)
def test_a_draw_has_so_many_different_blocks_whatever_the_weights(
    weights: list[float], share: float, seed: int
) -> None:
    num = round(share * len(weights))
    sampler = LayerSampler(num_blocks=len(weights), num_sampled=num, weights=tuple(weights))
    drawn = sampler.draw(np.random.default_rng(seed))
    assert len(drawn) == len(set(drawn)) == num and all(0 <= block < len(weights) for block in drawn)
    assert sampler.inclusion().sum() == pytest.approx(num)


@pytest.mark.parametrize(
    ("num_sampled", "weights", "sentence"),
    [
        (5, (), "has 4 blocks; expected 0 to 4"),
        (2, (1.0, 2.0), "one number of at least 0 for each"),
        (2, (1.0, 2.0, 3.0, -1.0), "one number of at least 0 for each"),
        (2, (1.0, 0.0, 0.0, 0.0), "fewer of the weights are above 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(
    num_sampled: int, weights: tuple[float, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LayerSampler(num_blocks=4, num_sampled=num_sampled, weights=weights)
