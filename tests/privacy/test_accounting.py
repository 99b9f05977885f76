"""Epsilon against closed forms derived in this file, and what a run's budget counts."""

import json
import math
import sys
from math import comb
from pathlib import Path

import mpmath
import pytest
from mpmath import mpf, workdps
from scipy.optimize import brentq
from scipy.stats import norm

from fedsign.errors import ConfigError
from fedsign.privacy.accounting import Accountant
from fedsign.privacy.budget import NAME, Budget

DELTA = 1e-5


def balle_wang(multiplier: float, delta: float) -> float:
    """Theorem 8 of arXiv 1805.06530: delta = Phi(1/2s - e s) - exp(e) Phi(-1/2s - e s), for s noise per sensitivity."""

    def excess(epsilon: float) -> float:
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        return float(norm.cdf(a - b) - math.exp(epsilon + norm.logcdf(-a - b)) - delta)

    return float(brentq(excess, 0, 500))


def unsampled(z: float) -> Accountant:
    return Accountant(noise_multiplier=z, delta=DELTA, num_clients=100, sample_size=100)


def sampled(z: float, num_clients: int, sample_size: int) -> Accountant:
    return Accountant(noise_multiplier=z, delta=DELTA, num_clients=num_clients, sample_size=sample_size)


@pytest.mark.parametrize("z", [1.0, 2.0, 5.0, 20.0])
def test_one_round_without_sampling_has_the_exact_epsilon_of_noise_z_c_on_a_sensitivity_of_2_c(z: float) -> None:
    assert unsampled(z).epsilon(1) == pytest.approx(balle_wang(z / 2, DELTA), rel=1e-6)


@pytest.mark.parametrize("rounds", [4, 25, 100])
def test_rounds_without_sampling_are_one_round_of_less_noise(rounds: int) -> None:
    """T Gaussians of noise s are one of noise s / T^(1/2)."""
    expected = balle_wang(20 / 2 / math.sqrt(rounds), DELTA)
    assert unsampled(20.0).epsilon(rounds) == pytest.approx(expected, rel=1e-6)


def renyi_epsilon(z: float, num_clients: int, sample_size: int, rounds: int) -> float:
    """Theorem 27 of arXiv 1808.00087 at integer orders, in 60 digits; epsilon by Proposition 12 of arXiv 2004.00010."""
    q, s = mpf(sample_size) / num_clients, mpf(z) / 2
    best = math.inf
    with workdps(60):
        moment = [mpmath.exp(mpf(j) * (j - 1) / (2 * s**2)) for j in range(66)]  # exp((j - 1) e(j))
        forward = [mpmath.fsum((-1) ** i * comb(j, i) * moment[i] for i in range(j + 1)) for j in range(66)]
        for order in range(2, 65):
            total = 1 + q**2 * comb(order, 2) * min(4 * (moment[2] - 1), 2 * moment[2])
            for j in range(3, order + 1):
                middle = 4 * mpmath.sqrt(abs(forward[2 * (j // 2)] * forward[2 * -(-j // 2)]))
                total += q**j * comb(order, j) * min(middle, 2 * moment[j])
            converted = math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)
            best = min(best, rounds * float(mpmath.log(total)) / (order - 1) + converted)
    return best


@pytest.mark.parametrize(("z", "rounds"), [(4.0, 1), (8.0, 10), (10.0, 50), (2.0, 20)])
def test_a_secret_sample_costs_what_the_theorem_says(z: float, rounds: int) -> None:
    """The library looks at more orders, between and beyond these, which may save some."""
    expected = renyi_epsilon(z, 1000, 50, rounds)
    assert 0.99 * expected < sampled(z, 1000, 50).epsilon(rounds) <= expected * (1 + 1e-9)


def test_epsilon_grows_with_rounds_and_falls_with_noise_and_with_the_population() -> None:
    accountant = sampled(4.0, 1000, 50)
    spent = [accountant.epsilon(rounds) for rounds in range(0, 60, 10)]
    assert spent[0] == 0 and spent == sorted(spent) and len(set(spent)) == 6
    assert sampled(8.0, 1000, 50).epsilon(10) < accountant.epsilon(10)
    assert sampled(4.0, 10_000, 50).epsilon(10) < accountant.epsilon(10)


def test_a_sample_never_costs_more_than_everybody() -> None:
    """With little noise the theorem's bound is the looser one."""
    for z in (0.5, 1.0, 4.0):
        assert sampled(z, 100, 20).epsilon(40) <= unsampled(z).epsilon(40)


def test_no_noise_is_no_privacy() -> None:
    assert unsampled(0.0).epsilon(1) == math.inf == sampled(0.0, 100, 5).epsilon(1)


def test_update_and_count_together_cost_what_the_multiplier_says() -> None:
    """The library's own combination of two Gaussians, of 2 C under noise y C, and of 1 under noise s."""
    import dp_accounting

    z, s = 1.5, 2.0
    y = (z**-2 - (2 * s) ** -2) ** -0.5
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(
        dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(y / 2), dp_accounting.GaussianDpEvent(s)])
    )
    assert accountant.get_epsilon(DELTA) == pytest.approx(unsampled(z).epsilon(1), rel=1e-3)


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedsign\[privacy\]'"):
        unsampled(1.0)


# The budget of a run


def budget(folder: Path, *, round: int = 0) -> Budget:
    return Budget(folder, unsampled(10.0), round=round)


def test_every_round_is_a_release(tmp_path: Path) -> None:
    book = budget(tmp_path)
    spent = [book.spend(round, {"model": f"tag {round}"}, {}) for round in (1, 2, 3)]
    assert spent == [unsampled(10.0).epsilon(num) for num in (1, 2, 3)]


def test_a_round_run_again_with_the_same_result_costs_nothing_and_with_another_one_it_does(tmp_path: Path) -> None:
    first = budget(tmp_path)
    for round in (1, 2, 3):
        first.spend(round, {"model": f"tag {round}"}, {})
    again = budget(tmp_path, round=1)
    assert again.total == unsampled(10.0).epsilon(3), "what was released stays released"
    assert again.spend(2, {"model": "tag 2"}, {}) == unsampled(10.0).epsilon(2)
    assert again.spend(3, {"model": "another"}, {}) == unsampled(10.0).epsilon(4)
    assert budget(tmp_path, round=3).spend(4, {"model": "tag 4"}, {}) == unsampled(10.0).epsilon(5)


def test_the_client_that_has_replied_most_often_is_the_one_that_counts(tmp_path: Path) -> None:
    book = budget(tmp_path)
    assert book.spend(1, {"0": "a", "1": "b"}, {}) == unsampled(10.0).epsilon(1)
    assert book.spend(2, {"2": "c", "3": ""}, {}) == unsampled(10.0).epsilon(1)
    assert book.spend(3, {"3": "d", "4": "e"}, {}) == unsampled(10.0).epsilon(2)


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    budget(tmp_path).spend(1, {"model": "tag"}, {})
    path = tmp_path / NAME
    path.write_text(path.read_text() + '{"round": 2, "rel')
    budget(tmp_path, round=1).spend(2, {"model": "other"}, {})
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2]
