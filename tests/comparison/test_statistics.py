"""Verdicts: their error rate, and that they can be right.

Aggregates against rliable's own code, ranks against Demšar's tables.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fedsign.comparison import aggregates, statistics_charts
from fedsign.comparison.charts import differences
from fedsign.comparison.headline import headline
from fedsign.comparison.inference import better, corrected, holm, paired_p_values
from fedsign.comparison.ranks import MIN_BLOCKS, critical_difference, rank
from fedsign.comparison.report import render
from fedsign.comparison.tables import results
from fedsign.comparison.verdict import LOST, UNDECIDED, standings
from tests.comparison.test_report_comparison import a_summary, with_failed
from tests.unit.report_samples import ALPHAS, a_comparison

Array = NDArray[np.float64]

NOISES = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "heavy tails": lambda draw, shape: draw.standard_t(3, size=shape),
    "unequal variances": lambda draw, shape: draw.normal(size=shape) * np.geomspace(1, 10, shape[1])[:, None],
}


def upper_limit(found: int, of: int) -> float:
    """Clopper and Pearson's, of a two-sided 95 % interval."""
    return float(stats.beta.ppf(0.975, found + 1, of - found))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("num_strategies", [2, 4, 6, 10])
def test_equal_strategies_get_a_verdict_in_one_comparison_of_twenty_at_most(noise: str, num_strategies: int) -> None:
    """Seeds have an effect of their own, which pairing removes.

    With two strategies the rate is 5 % exactly: of 10,000 the limit is near 5.4 %.
    """
    draw = np.random.default_rng(num_strategies)
    num = 10_000 if noise == "normal" or num_strategies < 10 else 3_000
    for num_seeds in (3, 5, 10, 20):
        values = 3 * draw.normal(size=(num, 1, num_seeds)) + NOISES[noise](draw, (num, num_strategies, num_seeds))
        wrong = int(better(values).any(axis=(-2, -1)).sum())
        assert upper_limit(wrong, num) <= 0.06, num_seeds


def test_uncorrected_intervals_would_be_wrong_far_more_often() -> None:
    """The simulation sees it: 15 pairs of 6 strategies at 5 % each."""
    values = np.random.default_rng(0).normal(size=(2_000, 6, 10))
    first, second = np.triu_indices(6, 1)
    assert (paired_p_values(values[:, first], values[:, second]) <= 0.05).any(axis=-1).mean() > 0.3


def test_a_difference_is_found_as_often_as_the_noncentral_t_distribution_says() -> None:
    """Two strategies, differences of mean 1 and deviation 1, 12 seeds: t is noncentral with sqrt(12)."""
    values = np.random.default_rng(1).normal(size=(10_000, 2, 12)) / np.sqrt(2)
    values[:, 0] += 1.0
    limit, shift = stats.t.ppf(0.975, 11), np.sqrt(12)
    power = stats.nct.sf(limit, 11, shift)
    assert power > 0.85
    assert better(values)[:, 0, 1].mean() == pytest.approx(power, abs=4 * np.sqrt(power * (1 - power) / 10_000))


def test_one_better_strategy_of_four_is_found_and_is_the_only_one_in_bold() -> None:
    """Ahead by 4 deviations: missed where one of three tests at 0.05 / 4 is; noncentral t with 4 sqrt(10 / 2)."""
    values = np.random.default_rng(2).normal(size=(2_000, 4, 10))
    values[:, 0] += 4.0
    found = better(values)
    missed = 3 * stats.nct.cdf(stats.t.ppf(1 - 0.05 / 8, 9), 9, 4 * np.sqrt(5))
    assert found[:, 0, 1:].all(axis=-1).mean() >= 1 - missed - 0.01
    assert found[:, 1:].any(axis=(-2, -1)).mean() <= 0.06


def test_p_values_are_scipys_and_their_correction_is_that_of_statsmodels() -> None:
    from statsmodels.stats.multitest import multipletests

    values = np.random.default_rng(3).normal(size=(5, 7)) + np.arange(5)[:, None] / 2
    values[1, 2] = values[4, 6] = np.nan
    pairs = list(zip(*np.triu_indices(5, 1), strict=True))
    raw = [float(stats.ttest_rel(values[i], values[j], nan_policy="omit").pvalue) for i, j in pairs]
    _, expected, _, _ = multipletests(raw, method="holm")
    assert holm(np.array(raw), np.ones(10)) == pytest.approx(expected)
    weights = [1.0 if 2 in pair else 1 / 6 for pair in pairs]
    found = corrected(values, reference=2)
    assert [found[pair] for pair in pairs] == pytest.approx(holm(np.array(raw), np.array(weights)).tolist())
    assert np.array_equal(found, found.T) and min(expected) < 0.05 < max(expected)


def test_the_correction_with_weights_is_the_closed_test_of_all_intersections() -> None:
    """A hypothesis is rejected with every set that it is in; a set by Bonferroni's test with weights."""
    draw = np.random.default_rng(8)
    p, weights = draw.uniform(0, 0.2, size=(50, 6)), draw.uniform(0.1, 1, size=6)
    sets = [list(each) for size in range(1, 7) for each in combinations(range(6), size)]
    of_sets = {tuple(each): (p[:, each] * weights[each].sum() / weights[each]).min(axis=1) for each in sets}
    expected = np.stack(
        [np.max([of_sets[tuple(each)] for each in sets if at in each], axis=0) for at in range(6)], axis=1
    )
    assert holm(p, weights) == pytest.approx(np.minimum(expected, 1))


def test_equal_differences_have_the_p_value_of_their_signs() -> None:
    """They have no deviation to divide by, which a coarse metric makes by chance: n equal signs have 2 / 2^n."""
    reference = np.array([0.25, 0.5, 0.75])
    assert paired_p_values(reference + 0.1, reference) == pytest.approx(0.25)
    assert paired_p_values(reference, reference) == 1.0
    assert paired_p_values(np.array([0.3, np.nan, np.nan]), reference) == 1.0


def of(summary: Any) -> list[str]:
    return [row.says for row in standings(summary).rows]


def test_everything_that_is_shown_comes_from_the_corrected_tests(tmp_path: Path) -> None:
    """Bold, words, dots and headline are those of `better`, on tables with and without a difference."""
    draw = np.random.default_rng(4)
    for number in range(20):
        values = 0.5 + 0.01 * draw.normal(size=(3, 5))
        values[2] += 0.05 * (number % 3)
        names = ("first", "second", "third")
        summary = a_summary(tmp_path, **{name: tuple(row.tolist()) for name, row in zip(names, values, strict=True)})
        shown = better(values)
        bold = [row.entry.strategy for table in results(summary) for row in table.rows if row.is_bold]
        assert bold == [name for at, name in enumerate(names) if shown[at].any() and not shown[:, at].any()]
        expected = ["better" if shown[at, 0] else "worse" if shown[0, at] else UNDECIDED for at in (1, 2)]
        assert of(summary) == ["reference", *expected]
        chart = differences(summary)
        assert chart is not None and [mark.is_open for mark in chart.series] == [each == UNDECIDED for each in expected]
        assert (headline(summary).best == "Too few seeds to tell") == (not shown.any())


def test_where_nothing_is_shown_nothing_is_bold(tmp_path: Path) -> None:
    summary = a_summary(tmp_path, first=(0.90, 0.91, 0.92), second=(0.95, 0.90, 0.93), third=(0.93, 0.96, 0.9))
    page = render(summary)
    assert 'class="is-best"' not in page and "<b>Too few seeds to tell</b>" in page
    assert "none of 3 tests shows a difference" in page and "too few seeds to tell, p = 1" in page


def test_conditions_are_pooled_by_seed_and_have_no_verdict_of_their_own(tmp_path: Path) -> None:
    """Two conditions of three seeds are three pairs, not six."""
    summary = a_comparison(tmp_path, strategies=["fedavg", "feddyn"], conditions=ALPHAS[:2], seeds=3)
    (row,) = [row for row in standings(summary).rows if row.strategy == "feddyn"]
    values = {name: [each.values for each in summary.entries if each.strategy == name] for name in summary.labels}
    means = [np.mean(values[name], axis=0) for name in ("feddyn", "fedavg")]
    expected = stats.ttest_rel(*means)
    assert row.difference is not None and row.difference.num_pairs == 3
    assert row.p == pytest.approx(expected.pvalue)
    assert (row.difference.low, row.difference.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert not any(each.is_bold or each.verdict for table in results(summary) for each in table.rows)
    chart = differences(summary)
    assert chart is not None and [mark.is_open for mark in chart.series] == [False, True, True]


def test_a_seed_that_lacks_a_condition_is_left_out_of_the_pooled_mean(tmp_path: Path) -> None:
    """Its mean over the other conditions would be of other conditions than the reference's."""
    summary = a_comparison(tmp_path, strategies=["fedavg", "feddyn"], conditions=ALPHAS[:2], seeds=3)
    *others, last = summary.entries
    lost = replace(summary, entries=(*others, replace(last, values=(None, *last.values[1:]))))
    whole, left = (standings(each).row("feddyn").values for each in (summary, lost))
    assert list(left) == [1, 2] and left == {seed: whole[seed] for seed in left}


def test_a_strategy_that_lost_seeds_is_not_shown_to_be_better(tmp_path: Path) -> None:
    summary = a_summary(tmp_path, first=(0.5, 0.51, 0.52, 0.5), second=(0.9, 0.91, 0.925, 0.9))
    assert of(summary) == ["reference", "better"]
    lost = with_failed(summary, "second", 1)
    assert of(lost) == ["reference", LOST] and not standings(lost).bold
    both = with_failed(lost, "first", 1)
    assert of(both) == ["reference", "better"]


@pytest.fixture(scope="module")
def rliable() -> Iterator[tuple[Any, Any]]:
    """rliable's code.  It needs `arch.bootstrap` alone; the rest of arch 7 imports names that pandas 3 lacks."""
    spec = find_spec("arch")
    assert spec is not None and spec.submodule_search_locations is not None
    package = ModuleType("arch")
    package.__path__ = list(spec.submodule_search_locations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "arch", package)
        from rliable import library, metrics

        state = np.random.get_state()  # noqa: NPY002
        yield library, metrics
        np.random.set_state(state)  # noqa: NPY002


@pytest.mark.parametrize("shape", [(3, 1), (5, 3), (10, 2)])
def test_aggregates_and_their_intervals_are_rliables(shape: tuple[int, int], rliable: tuple[Any, Any]) -> None:
    """rliable draws rows from NumPy's global generator; drawn again here, so that intervals are equal, not near."""
    library, metrics = rliable
    draw = np.random.default_rng(5)
    scores, others = draw.normal(size=shape), draw.normal(size=shape).round(1)
    others[0] = scores[0]  # ties
    limits, reps = np.linspace(-1, 1, 7), 200

    def both(func: Any, *given: Array) -> tuple[Array, Array, Array]:
        """rliable's estimate and interval."""
        np.random.seed(6)  # noqa: NPY002 - rliable's own generator
        value, interval = library.get_interval_estimates(
            {"a": given[0] if len(given) == 1 else list(given)}, func, reps=reps
        )
        return value["a"], interval["a"][0], interval["a"][1]

    def rows(num: int) -> list[Any]:
        """The rows of so many arrays, drawn in turn."""
        again = np.random.RandomState(6)
        drawn = [[again.choice(shape[0], shape, replace=True) for _ in range(num)] for _ in range(reps)]
        return list(np.swapaxes(np.array(drawn), 0, 1))

    alone, (first, second) = rows(1)[0], rows(2)
    resampled = aggregates.resample(scores, alone)
    pairs = [aggregates.resample(each, indices) for each, indices in ((scores, first), (others, second))]
    for found, expected in (
        (
            aggregates.estimate(aggregates.interquartile_mean(scores), aggregates.interquartile_mean(resampled)),
            both(lambda x: np.array([metrics.aggregate_iqm(x)]), scores),
        ),
        (
            aggregates.estimate(aggregates.profile(scores, limits), aggregates.profile(resampled, limits)),
            both(lambda x: library.score_distributions(x, limits), scores),
        ),
        (
            aggregates.estimate(aggregates.improvement(scores, others), aggregates.improvement(*pairs)),
            both(lambda x, y: np.array([metrics.probability_of_improvement(x, y)]), scores, others),
        ),
    ):
        for own, its in zip((found.value, found.low, found.high), expected, strict=True):
            assert np.atleast_1d(own) == pytest.approx(np.atleast_1d(its), abs=1e-12)


def test_our_own_draws_are_seeded_even_and_stay_within_a_condition() -> None:
    """Of 5 seeds each is drawn with probability 1/5: 30,000 draws are within 4 standard errors, sqrt(0.16 / 30,000)."""
    indices = aggregates.draw((5, 3), stream=1)
    assert indices.shape == (aggregates.RESAMPLES, 5, 3)
    assert np.array_equal(indices, aggregates.draw((5, 3), stream=1))
    assert not np.array_equal(indices, aggregates.draw((5, 3), stream=2))
    shares = np.bincount(indices.ravel(), minlength=5) / indices.size
    assert shares == pytest.approx(0.2, abs=4 * np.sqrt(0.16 / indices.size))
    scores = np.arange(15.0).reshape(5, 3)
    assert np.array_equal(aggregates.resample(scores, indices) % 3, np.broadcast_to(np.arange(3), indices.shape))


@pytest.mark.parametrize("metric", ["accuracy", "rmse"])
def test_the_page_shows_better_strategies_higher_in_every_description(metric: str, tmp_path: Path) -> None:
    summary = a_comparison(tmp_path, metric=metric, conditions=ALPHAS[:2], strategies=["fedavg", "feddyn", "moon"])
    found = statistics_charts.statistics(summary)
    drawn = statistics_charts.charts(summary, found)
    assert list(drawn) == [
        "interquartile-mean",
        "performance-profile",
        "probability-of-improvement",
        "critical-difference",
    ]
    assert found.ranks is not None and min(found.ranks.mean, key=lambda name: found.ranks.mean[name]) == "feddyn"
    improved = found.aggregates["feddyn"].improvement
    assert improved is not None and improved.value > 0.9
    runs = np.sort(np.concatenate([entry.values for entry in summary.entries if entry.strategy == "feddyn"]))
    expected = runs[2:-2].mean() * summary.scale.factor  # of 10 runs
    (mark,) = [each for each in drawn["interquartile-mean"].series if each.name == "FedDyn"]
    assert mark.x[0] == pytest.approx(expected) and mark.low[0] <= mark.x[0] <= mark.high[0]
    lines = {each.name: each for each in drawn["performance-profile"].series}
    assert sum(lines["FedDyn"].y) > sum(lines["FedAvg"].y)
    assert list(lines["FedDyn"].x) == sorted(lines["FedDyn"].x)


def test_ranks_are_scipys_within_each_block_and_friedmans_p_is_that_of_the_scores() -> None:
    scores = np.random.default_rng(7).normal(size=(4, 14)).round(1) + np.arange(4)[:, None] / 2
    found = rank(dict(zip("abcd", scores, strict=True)))
    assert found is not None and found.num_blocks == 14
    expected = np.mean([stats.rankdata(-block) for block in scores.T], axis=0)
    assert list(found.mean.values()) == pytest.approx(expected.tolist())
    assert found.friedman_p == pytest.approx(float(stats.friedmanchisquare(*scores).pvalue))
    assert found.critical_difference == pytest.approx(1.25, abs=0.005)  # Demšar's example, k = 4 and N = 14


def test_critical_differences_are_those_of_demsars_table() -> None:
    """Table 5 (a) at 0.05: q of 2 to 10 classifiers; with 6 N = k (k + 1) the difference is q itself."""
    table = [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]
    found = [critical_difference(num, 1) / np.sqrt(num * (num + 1) / 6) for num in range(2, 11)]
    assert found == pytest.approx(table, abs=0.001)


def test_too_few_blocks_have_ranks_and_no_critical_difference(tmp_path: Path) -> None:
    """A lost run is last in its block, and a block with a run that is still to be run is left out."""
    summary = a_comparison(
        tmp_path, seeds=5, strategies=["fedavg", "feddyn", "moon"], diverged=[("feddyn", 0)], unfinished=[("moon", 4)]
    )
    found = statistics_charts.statistics(summary)
    assert found.ranks is not None and found.ranks.num_blocks == 4 < MIN_BLOCKS
    assert found.ranks.mean["feddyn"] == pytest.approx((3 + 1 + 1 + 1) / 4)
    assert found.ranks.critical_difference is None and found.ranks.friedman_p is None
    assert "4 blocks are too few for a critical difference" in render(summary)
    assert rank({"a": np.ones(20), "b": np.zeros(20)}) is None
