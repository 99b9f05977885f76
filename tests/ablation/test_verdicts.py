"""Verdicts of an ablation: corrected for multiple tests, in the metric's direction, and not based on lucky seeds."""

import numpy as np
import pytest
from scipy import stats

from fedsign.ablation.controls import controls_of
from fedsign.ablation.reading import corrected, differences, pairs_of
from fedsign.comparison.verdict import UNDECIDED
from simulations.ablation.execution import method_of, prepared
from simulations.api import config_of
from tests.comparison.test_statistics import NOISES, upper_limit

SEEDS = range(12)
PRIMARY, OTHERS = [("reg", "avg"), ("own", "reg")], [("own", "avg"), ("init", "reg"), ("init", "avg")]


def drawn(**means: float) -> dict[str, dict[int, float | None]]:
    """Rows whose values share a seed's own effect, and scatter by 0.1 around it."""
    random = np.random.default_rng(0)
    shared = random.normal(size=len(SEEDS))
    return {
        row: dict(zip(SEEDS, map(float, mean + shared + 0.1 * random.normal(size=len(SEEDS))), strict=True))
        for row, mean in means.items()
    }


NOBODY = {"avg": 0, "reg": 0, "own": 0, "init": 0}
APART = drawn(avg=0.0, reg=1.0, own=1.0, init=2.0)


def test_what_is_far_apart_is_told_and_what_is_alike_is_not() -> None:
    found = differences(APART, PRIMARY, OTHERS, lost=NOBODY, higher_is_better=True)
    says = {pair: difference.says for pair, difference in found.items()}
    assert says == {
        ("reg", "avg"): "better",
        ("own", "reg"): UNDECIDED,
        ("own", "avg"): "better",
        ("init", "reg"): "better",
        ("init", "avg"): "better",
    }


def test_of_a_loss_the_smaller_is_the_better() -> None:
    found = differences(APART, PRIMARY, OTHERS, lost=NOBODY, higher_is_better=False)
    assert found["reg", "avg"].says == "worse" and found["reg", "avg"].interval.mean > 0


def test_a_row_that_has_lost_more_seeds_is_not_called_better() -> None:
    found = differences(APART, PRIMARY, OTHERS, lost=NOBODY | {"init": 1}, higher_is_better=True)
    assert found["init", "reg"].says == UNDECIDED and found["reg", "avg"].says == "better"
    lucky = differences(APART, PRIMARY, OTHERS, lost=NOBODY | {"avg": 1}, higher_is_better=False)
    assert lucky["reg", "avg"].says == UNDECIDED  # the row would be worse than one that has lost more


def test_p_values_are_holms_with_the_primary_differences_weighing_as_much_as_all_others() -> None:
    """By hand: weights 1, 1 and three thirds; p / w in ascending order times the weights that are left."""
    values = drawn(avg=0.0, reg=0.06, own=0.05, init=0.1)
    found = differences(values, PRIMARY, OTHERS, lost=NOBODY, higher_is_better=True)
    pairs = [*PRIMARY, *OTHERS]
    raw = {
        (one, other): stats.ttest_rel([*values[one].values()], [*values[other].values()]).pvalue for one, other in pairs
    }
    weight = {pair: 1.0 if pair in PRIMARY else 1 / 3 for pair in pairs}
    left, highest = sum(weight.values()), 0.0
    for pair in sorted(pairs, key=lambda pair: raw[pair] / weight[pair]):
        highest = max(highest, raw[pair] / weight[pair] * left)
        assert found[pair].p == pytest.approx(min(1.0, highest))
        left -= weight[pair]


def test_controls_that_were_not_run_leave_the_weights_of_the_others() -> None:
    few = {row: APART[row] for row in ("avg", "reg", "init")}
    found = differences(few, PRIMARY[:1], OTHERS[1:], lost=NOBODY, higher_is_better=True)
    assert found.keys() == {("reg", "avg"), ("init", "reg"), ("init", "avg")}
    assert found["reg", "avg"].p <= 2 * stats.ttest_rel([*APART["reg"].values()], [*APART["avg"].values()]).pvalue


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("strategy", ["fedsign", "feddyn"])
def test_equal_rows_get_a_verdict_in_one_ablation_of_twenty_at_most(strategy: str, noise: str) -> None:
    """All differences of the page; seeds have an effect of their own, which pairing removes."""
    rows = controls_of(method_of(prepared(strategy, config_of({}))))
    primary, others = pairs_of(rows, strategy)
    at = {row.key: place for place, row in enumerate(rows)}
    one, other = (np.array([at[pair[side]] for pair in [*primary, *others]]) for side in (0, 1))
    draw, num = np.random.default_rng(0), 10_000
    for num_seeds in (3, 5, 10, 20):
        values = 3 * draw.normal(size=(num, 1, num_seeds)) + NOISES[noise](draw, (num, len(rows), num_seeds))
        p = corrected(values[:, one], values[:, other], num_primary=len(primary))
        assert upper_limit(int((p <= 0.05).any(axis=-1).sum()), num) <= 0.06, num_seeds
