"""Rounds to a target: smoothed, sustained, with censored runs; the speedup against closed forms."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsign.comparison.summary import Cell, CellResult, ToTarget
from fedsign.comparison.tables import results, speed_up_text
from fedsign.comparison.target import default_target, reaching, speed_up, to_target
from tests.comparison.test_comparison import lines_of
from tests.unit.report_samples import a_comparison


def a_run(values: list[float], seed: int, *, rounds: int | None = None, failure: str | None = None) -> CellResult:
    num = len(values) if rounds is None else rounds
    cell = Cell(id=f"{seed}", strategy="any", condition={}, choice={}, seed=seed, rounds=num)
    is_finished = failure is None and num == len(values)
    return CellResult(cell=cell, is_finished=is_finished, records=lines_of(list(values)), failure=failure)


def step(at: int, num: int = 30) -> list[float]:
    """0, and 1 from round `at` on."""
    return [float(round >= at) for round in range(1, num + 1)]


def taken_of(*runs: CellResult, target: float = 0.9) -> ToTarget:
    taken = to_target(runs, "accuracy", target, higher_is_better=True)
    assert taken is not None
    return taken


def test_a_run_reaches_the_target_when_its_smoothed_metric_stays_there() -> None:
    """Means of five: a step in round 10 is 0.2, 0.4, ..., and 1 in round 14; 0.6 is reached in round 12."""
    assert reaching(lines_of(step(10)), "accuracy", 0.9, higher_is_better=True) == 14 - 1
    assert reaching(lines_of(step(10)), "accuracy", 0.6, higher_is_better=True) == 12 - 1
    assert reaching(lines_of([1 - value for value in step(10)]), "accuracy", 0.1, higher_is_better=False) == 14 - 1
    short = [0.0, 1.0, 0.0, 1.0, 1.0]  # not smoothed, and stays for one more round
    assert reaching(lines_of(short), "accuracy", 0.9, higher_is_better=True) == 4 - 1
    assert reaching(lines_of(short[:4]), "accuracy", 0.9, higher_is_better=True) is None


@given(st.integers(1, 40), st.integers(0, 39), st.floats(0.5, 1e9), st.sampled_from([0.0, 0.2, 0.49]))
@settings(deadline=None)
def test_a_spike_of_one_round_never_reaches_the_target(num: int, at: int, height: float, level: float) -> None:
    """However high it is, and wherever: also in the first round, which is its own mean, and in the last."""
    values = [level] * num
    values[at % num] = height
    assert reaching(lines_of(values), "accuracy", 0.5, higher_is_better=True) is None
    assert reaching(lines_of([-value for value in values]), "accuracy", -0.5, higher_is_better=False) is None


def test_a_spike_does_not_win_rounds_to_target(tmp_path: Path) -> None:
    """One seed of each: the one with the spike is censored, the one that arrives late is not."""
    spike = [0.0] * 30
    spike[2] = 5.0
    late, lucky = taken_of(a_run(step(20), 0)), taken_of(a_run(spike, 0))
    assert (late.rounds, late.is_bound) == (24, False)
    assert (lucky.rounds, lucky.is_bound, lucky.num_reached) == (25, True, 0)
    faster = speed_up(lucky, late)
    assert faster is not None and faster.sign == "<" and faster.ratio == pytest.approx(24 / 25)


@pytest.mark.parametrize("higher", [True, False])
def test_a_reference_that_stays_where_it_ends_reaches_the_default_target(higher: bool) -> None:
    target = default_target(0.8, higher_is_better=higher)
    assert target is not None and (target < 0.8) == higher
    assert reaching(lines_of([0.8] * 10), "accuracy", target, higher_is_better=higher) == 0


def test_medians_are_over_all_seeds_and_a_censored_one_makes_them_bounds() -> None:
    """Rounds 12, 14 and 20 of three; runs of 30 rounds can be seen to stay from round 25 on at the latest."""
    runs = [a_run(step(at), seed) for seed, at in enumerate((16, 8, 10))]
    whole = taken_of(*runs)
    assert (whole.rounds, whole.is_bound, whole.num_reached, whole.num_seeds) == (14, False, 3, 3)
    assert (whole.bytes_down, whole.bytes_up) == (140, 42)
    never = a_run([0.0] * 30, 3)
    four = taken_of(*runs, never)
    assert (four.rounds, four.is_bound, four.num_reached) == ((14 + 20) / 2, False, 3)
    six = taken_of(*runs, never, a_run(step(27), 4), a_run([0.0] * 30, 5))
    assert (six.rounds, six.is_bound, six.num_reached, six.num_seeds) == ((20 + 25) / 2, True, 3, 6)
    assert dict(six.reached) == {0: 20, 1: 12, 2: 14, 3: None, 4: None, 5: None}
    assert to_target(runs, "accuracy", None, higher_is_better=True) is None


def test_a_seed_that_failed_never_reaches_the_target_and_one_that_is_pending_has_no_say() -> None:
    """Even where its rounds, as far as they went, had reached it; and it comes last, however early it failed."""
    good = [a_run(step(1), seed) for seed in range(2)]
    failed = [a_run(step(1, 15), seed, rounds=30, failure="no update") for seed in range(2, 5)]
    taken = taken_of(*good, *failed, a_run(step(1, 15), 5, rounds=30))
    assert (taken.num_reached, taken.num_seeds, taken.rounds, taken.is_bound) == (2, 5, 25, True)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=8))
@settings(deadline=None)
def test_the_speed_up_is_a_paired_interval_of_logarithms(pairs: list[tuple[int, int]]) -> None:
    own, reference = (taken_of(*(a_run(step(p[side]), seed) for seed, p in enumerate(pairs))) for side in (0, 1))
    found = speed_up(own, reference)
    assert found is not None and found.ratio is not None
    logs = [math.log(reference.reached[s] or 0) - math.log(own.reached[s] or 0) for s in range(len(pairs))]
    assert math.log(found.ratio) == pytest.approx(math.fsum(logs) / len(logs))
    if max(logs) - min(logs) > 1e-6:
        assert found.low is not None and found.high is not None
        expected = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
        assert (math.log(found.low), math.log(found.high)) == pytest.approx(tuple(expected))
    assert (found.sign, found.num_pairs, found.num_censored) == ("", len(pairs), 0)


def test_censored_pairs_make_the_speed_up_a_bound_or_unknown() -> None:
    """The reference is censored in one of two pairs, at 25 rounds: the ratios are 2 and more than 25 / 5."""
    own = taken_of(a_run(step(1), 0), a_run(step(1), 1))  # in round 1, which is its own mean
    own_late = taken_of(a_run(step(6), 0), a_run(step(1), 1))
    reference = taken_of(a_run(step(16), 0), a_run([0.0] * 30, 1))
    assert dict(own_late.reached) == {0: 10, 1: 1} and dict(reference.reached) == {0: 20, 1: None}
    bound = speed_up(own_late, reference)
    assert bound is not None and bound.ratio == pytest.approx(math.sqrt(2 * 25))
    assert (bound.sign, bound.low, bound.num_censored) == (">", None, 1)
    assert speed_up_text(bound) == "> × 7.07 (1 censored)"
    unknown = speed_up(taken_of(a_run([0.0] * 30, 0), a_run(step(1), 1)), reference)
    assert unknown is not None and unknown.ratio is None and unknown.num_censored == 2
    whole = speed_up(own, taken_of(a_run(step(6), 0), a_run(step(6), 1)))
    assert speed_up_text(whole) == "× 10.00"  # both ratios are equal
    assert speed_up(own, taken_of(a_run(step(1), 7))) is None  # no seed of both


def test_the_reference_has_no_speed_up_and_the_others_have(tmp_path: Path) -> None:
    summary = a_comparison(tmp_path, strategies=["fedavg", "feddyn"], target=0.8)
    texts: list[Any] = [row.speed_up for table in results(summary) for row in table.rows]
    assert texts[0] == "" and texts[1].startswith("× ") and "[" in texts[1]
