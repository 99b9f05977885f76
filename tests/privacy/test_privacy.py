"""Clipping, noise and secrets, against their definitions."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest

from fedsign.errors import ConfigError, FedSignError, ReplyError, ResumeError
from fedsign.federation.aggregation import Aggregate
from fedsign.privacy.central import Central
from fedsign.privacy.central_adaptive import CentralAdaptive
from fedsign.privacy.clipping import Layout, clipped, norm_of
from fedsign.privacy.secret import MARK, NAME, Secret, digest_of, open_secret
from fedsign.records import Role, Tensors, TrainReply
from simulations import run
from simulations.verify import verify

KEY = Secret(bytes(range(32)))
SIZE = 10_000


def within(values: np.ndarray, *, std: float) -> bool:
    """Whether the sum of squares lies where that of so many N(0, std^2) does but for one time in a million."""
    low, high = chi2.interval(1 - 1e-6, len(values))
    return bool(low < np.square(values / std).sum() < high)


# Secrets and their numbers


def test_numbers_are_standard_normal() -> None:
    drawn = KEY.normal(200_001, "update", 1)
    assert len(drawn) == 200_001 and within(drawn, std=1.0)
    assert kstest(drawn, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / np.sqrt(len(drawn))
    assert abs(np.corrcoef(drawn[:100_000], drawn[100_000:-1])[0, 1]) < 5 / np.sqrt(100_000)


def test_other_labels_or_another_secret_give_other_numbers_and_the_same_ones_the_same() -> None:
    first = KEY.normal(8, "update", 1, "ab")
    assert np.array_equal(first, KEY.normal(8, "update", 1, "ab"))
    others = [KEY.normal(8, "update", 2, "ab"), KEY.normal(8, "update", 1, "ac"), KEY.normal(8, "count", 1, "ab")]
    others.append(Secret(bytes(32)).normal(8, "update", 1, "ab"))
    assert not any(np.intersect1d(first, other).size for other in others)


def test_any_count_can_be_drawn() -> None:
    assert KEY.normal(0, "x").shape == (0,) and KEY.normal(1, "x").shape == (1,)


def test_a_secret_is_for_its_owner_only_random_and_shows_in_no_text(tmp_path: Path) -> None:
    first, other = open_secret(tmp_path / "a"), open_secret(tmp_path / "b")
    assert first.key != other.key and len(first.key) == 32
    assert stat.S_IMODE((tmp_path / "a" / NAME).stat().st_mode) == 0o600
    assert first.key.hex() not in f"{first!r} {first}" and repr(first.key) not in repr(first)
    assert open_secret(tmp_path / "a") == first
    assert {path.name for path in (tmp_path / "a").iterdir()} == {NAME, MARK}


def test_a_given_secret_is_copied_and_one_that_is_there_stays(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_bytes(KEY.key)
    assert open_secret(tmp_path / "run", given=str(given)) == KEY
    given.write_bytes(bytes(32))
    assert open_secret(tmp_path / "run", given=str(given)) == KEY


def test_what_is_no_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secret_file=.* cannot be read"):
        open_secret(tmp_path, given=str(tmp_path / "nothing"))
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="holds 3 bytes; expected 32"):
        open_secret(tmp_path, given=str(tmp_path / "short"))
    with pytest.raises(ResumeError, match=r"privacy\.key is missing"):
        open_secret(tmp_path, expected=True)


def test_a_secret_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    open_secret(tmp_path)
    content = (tmp_path / NAME).read_bytes()
    damaged = [content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :] for place in range(len(content))]
    for text in (b"", content[:31], content[:40], *damaged):
        (tmp_path / NAME).write_bytes(text)
        with pytest.raises(ResumeError, match=r"privacy\.key is damaged"):
            open_secret(tmp_path)


@pytest.mark.parametrize("name", ["central", "local"])
def test_a_run_whose_secret_is_gone_or_another_is_not_resumed(name: str, tmp_path: Path) -> None:
    """Else, the noise would come from a new stream, without a word."""
    part = {"name": name, "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}
    small = {"partition": {"num_clients": 4, "alpha": 1.0}, "server": {"cohort_size": 4}, "callbacks": []}
    roots = [str(tmp_path / each) for each in "ab"]
    first, other = (
        run({**small, "rounds": 1, "strategy": {"name": "fedavg"}, "privacy": part, "results": {"root": root}})
        for root in roots
    )
    assert not [damage for _, damage in verify(first.path) if damage]
    key = (first.path if name == "central" else first.folder.clients) / NAME
    content = key.read_bytes()
    key.unlink()
    for said in (r"privacy\.key is missing", r"privacy\.key is not the key"):
        assert NAME in " ".join(damage for _, damage in verify(first.path) if damage)
        with pytest.raises(ResumeError, match=said):
            run({"rounds": 2}, resume=first.path)
        shutil.copy((other.path if name == "central" else other.folder.clients) / NAME, key)
    key.write_bytes(content)
    key.with_name(MARK).unlink()
    assert MARK in " ".join(damage for _, damage in verify(first.path) if damage)
    assert len(run({"rounds": 2}, resume=first.path).rounds) == 2


# Clipping


def test_an_update_keeps_its_direction_and_gets_at_most_the_norm() -> None:
    update = np.array([3.0, 4.0])
    assert clipped(update, 5.0) == (pytest.approx(update), True)
    assert clipped(update, 1.0) == (pytest.approx(np.array([0.6, 0.8])), False)
    assert clipped(np.zeros(2), 1.0) == (pytest.approx(np.zeros(2)), True)


def test_the_norm_is_to_the_bit_the_same_with_any_number_of_threads() -> None:
    """Noise is derived from the update's bits. Engines use different thread counts, and BLAS sums in an order of its
    own.
    """
    code = (
        "import numpy as np; from fedsign.privacy.clipping import norm_of; "
        "print([norm_of(np.random.default_rng(0).normal(size=size)).hex() for size in (100_000, 1_000_000)])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True, text=True, check=True,
        ).stdout
        for threads in ("1", "2")
    ]  # fmt: skip
    assert said[0] == said[1]


def test_the_norm_is_that_of_a_vector_of_many_blocks() -> None:
    """Of n ones: n^(1/2), exactly, since n is a square."""
    assert norm_of(np.ones(1000**2)) == 1000.0 and norm_of(np.zeros(0)) == 0.0


def test_a_layout_gives_back_what_it_was_given_in_its_types() -> None:
    model = {
        "w": torch.randn(2, 3, generator=torch.Generator().manual_seed(0)),
        "b": torch.ones((), dtype=torch.float64),
    }
    extra = {"w": torch.full((2, 3), 0.5)}
    layout = Layout(model, extra)
    vector = layout.vector(model, extra)
    assert vector.shape == (13,) and vector.dtype == np.float64
    for given, found in zip((model, extra), layout.tensors(vector), strict=True):
        assert given.keys() == found.keys()
        assert all(torch.equal(given[name], found[name]) and given[name].dtype == found[name].dtype for name in given)
    with pytest.raises(ReplyError, match=r"came nothing, from other clients \['w'\]"):
        layout.vector(model, {})


# A trusted server


def rule(**changes: Any) -> Central:
    return Central(**{"clip_norm": 1.0, "noise_multiplier": 0.0, "delta": 1e-5, "sampling": "public", **changes})


SERVED: Tensors = {"w": torch.arange(SIZE, dtype=torch.float32) / SIZE}


def reply(partition: int, update: Any, **changes: Any) -> TrainReply:
    tensors = {"w": SERVED["w"] + torch.as_tensor(update, dtype=torch.float32)}
    fields = {"round": 1, "roles": {"w": Role.PARAMETER}, "num_examples": 1, "metrics": {}}
    return TrainReply(**{**fields, "partition": partition, "tensors": tensors, **changes})


def updates(count: int, *, seed: int = 0) -> list[torch.Tensor]:
    """Of norms about 1, 2, 3, ..."""
    stream = torch.Generator().manual_seed(seed)
    return [(place + 1) * torch.randn(SIZE, generator=stream) / SIZE**0.5 for place in range(count)]


def released(
    folder: Path, replies: list[TrainReply], *, cohort_size: int = 4, round: int = 1, **changes: Any
) -> Aggregate:
    privacy = rule(**changes)
    privacy.open(folder, cohort_size=cohort_size, expected=False)
    return gathered(privacy, replies, round=round)


def gathered(privacy: Central, replies: list[TrainReply], *, round: int = 1) -> Aggregate:
    found = privacy.gather(replies, None, round=round, served=SERVED, num_clients=10)
    assert found is not None
    return found


def move(found: Aggregate) -> np.ndarray:
    moved: np.ndarray = (found.mean["w"].double() - SERVED["w"].double()).numpy()
    return moved


def test_without_noise_and_with_a_wide_norm_it_is_the_mean(tmp_path: Path) -> None:
    replies = [reply(k, update) for k, update in enumerate(updates(4))]
    expected = torch.stack([each.tensors["w"] for each in replies]).double().mean(0)
    found = released(tmp_path, replies, clip_norm=1e9)
    assert torch.equal(found.mean["w"], expected.float())


def test_each_update_is_clipped_by_itself_and_a_missing_one_is_zero(tmp_path: Path) -> None:
    given = updates(3)
    expected = sum(each / max(1.0, float(each.norm()) / 1.5) for each in given) / 4
    moved = move(released(tmp_path, [reply(k, each) for k, each in enumerate(given)], clip_norm=1.5))
    np.testing.assert_allclose(moved, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 0.5, 100.0, 1e30])
def test_replacing_one_client_moves_the_mean_by_at_most_two_norms_over_the_cohort(size: float, tmp_path: Path) -> None:
    given = updates(4)
    before = move(released(tmp_path, [reply(k, each) for k, each in enumerate(given)], clip_norm=0.7))
    given[2] = -size * given[2] / given[2].norm()
    after = move(released(tmp_path, [reply(k, each) for k, each in enumerate(given)], clip_norm=0.7))
    assert np.linalg.norm(after - before) <= 2 * 0.7 / 4 * (1 + 1e-5)


def test_what_travels_besides_is_clipped_with_the_update_as_one_vector(tmp_path: Path) -> None:
    """Update (3, 0, ...) and 4 besides: one vector of length 5, clipped to 1."""
    update = torch.zeros(SIZE)
    update[0] = 3.0
    extra = {"w": torch.zeros(SIZE)}
    extra["w"][0] = 4.0
    found = released(tmp_path, [reply(0, update, extra=extra)], cohort_size=1)
    assert move(found)[0] == pytest.approx(0.6, abs=1e-6)
    assert found.extra["w"][0] == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize(("clip_norm", "noise_multiplier", "cohort_size"), [(1.0, 1.0, 4), (0.1, 3.0, 20)])
def test_the_noise_has_the_size_z_c_over_n_in_every_coordinate(
    clip_norm: float, noise_multiplier: float, cohort_size: int, tmp_path: Path
) -> None:
    replies = [reply(k, update) for k, update in enumerate(updates(4))]
    settings = {"clip_norm": clip_norm, "cohort_size": cohort_size}
    plain = released(tmp_path, replies, **settings)
    noisy = released(tmp_path, replies, noise_multiplier=noise_multiplier, **settings)
    assert within(move(noisy) - move(plain), std=noise_multiplier * clip_norm / cohort_size)


def test_the_noise_is_the_same_for_the_same_replies_and_another_for_others_or_in_another_round(tmp_path: Path) -> None:
    """Else the difference of two models of one round, run twice, would be without noise."""
    given = updates(4)
    replies = [reply(k, each) for k, each in enumerate(given)]
    fewer, other = replies[:3], [*replies[:3], reply(3, given[3] * 1.001)]
    noise = {
        name: move(released(tmp_path, some, round=round, noise_multiplier=1.0)) - move(released(tmp_path, some))
        for name, some, round in [
            ("first", replies, 1), ("again", replies, 1), ("later", replies, 2),
            ("fewer", fewer, 1), ("other", other, 1),
        ]
    }  # fmt: skip
    assert np.array_equal(noise["first"], noise["again"])
    for name in ("later", "fewer", "other"):
        assert within(noise[name] - noise["first"], std=2**0.5 / 4), name


def test_a_strategy_outside_of_a_run_has_no_secret() -> None:
    with pytest.raises(FedSignError, match="without a run's secret"):
        gathered(rule(), [reply(0, torch.zeros(SIZE))])


def test_a_digest_tells_arrays_and_labels_apart() -> None:
    one, other = np.zeros(2), np.array([0.0, 1e-300])
    assert len({digest_of([one], 1), digest_of([one], 2), digest_of([other], 1), digest_of([one, one], 1)}) == 4


# A norm that follows a quantile


def adaptive(**changes: Any) -> CentralAdaptive:
    return CentralAdaptive(**{"noise_multiplier": 0.0, "delta": 1e-5, **changes})


def after(rule: CentralAdaptive, num_below: int, num_replies: int = 10, *, round: int = 1) -> float:
    rule.follow(num_below, num_replies, cohort_size=10, secret=KEY, labels=[round])
    return rule.clip_norm


@pytest.mark.parametrize(("num_below", "share"), [(0, 0.0), (5, 0.5), (10, 1.0)])
def test_the_norm_moves_by_the_geometric_rule(num_below: int, share: float) -> None:
    """C exp(-eta (b - g)): it shrinks where more than the quantile are below it."""
    rule = adaptive(initial_clip_norm=2.0, clip_lr=0.3, target_quantile=0.5)
    assert after(rule, num_below) == pytest.approx(2.0 * np.exp(-0.3 * (share - 0.5)))


def test_a_missing_reply_counts_as_half_below() -> None:
    rule = adaptive(initial_clip_norm=1.0, clip_lr=0.2, target_quantile=0.5)
    assert after(rule, 3, num_replies=6) == pytest.approx(1.0)


@pytest.mark.parametrize(("start", "quantile"), [(0.01, 0.5), (100.0, 0.5), (0.01, 0.8)])
def test_the_norm_finds_the_quantile_of_known_norms(start: float, quantile: float) -> None:
    """Norms 1 to 10: the share at most C is the quantile for every C between two of them."""
    norms = np.arange(1, 11)
    rule = adaptive(initial_clip_norm=start, clip_lr=0.2, target_quantile=quantile)
    for round in range(200):
        after(rule, int((norms <= rule.clip_norm).sum()), round=round)
    low, high = norms[round_half(10 * quantile) - 1], norms[round_half(10 * quantile)]
    assert low * np.exp(-0.2) <= rule.clip_norm <= high * np.exp(0.2)


def round_half(number: float) -> int:
    return int(number + 0.5)


def test_the_count_has_noise_of_its_deviation() -> None:
    """log C' / C = -eta (b - g), so b can be read off it."""
    drawn = []
    for round in range(2000):
        rule = adaptive(noise_multiplier=1.0, initial_clip_norm=1.0, clip_lr=0.1, count_noise_stddev=3.0)
        drawn.append(0.5 - np.log(after(rule, 5, round=round)) / 0.1)
    assert within(10 * (np.array(drawn) - 0.5), std=3.0)


@pytest.mark.parametrize(("z", "stddev"), [(0.5, 1.0), (1.0, 3.0), (2.0, 1.5)])
def test_update_and_count_share_the_budget(z: float, stddev: float) -> None:
    """1 / y^2 + 1 / (2 s)^2 = 1 / z^2."""
    y = adaptive(noise_multiplier=z, count_noise_stddev=stddev).update_multiplier(10)
    assert y > z and 1 / y**2 + 1 / (2 * stddev) ** 2 == pytest.approx(1 / z**2)


def test_without_a_value_the_count_takes_a_twentieth_of_the_cohort_or_the_multiplier() -> None:
    rule = adaptive(noise_multiplier=1.0)
    assert rule.update_multiplier(200) == pytest.approx((1 - 1 / 20**2) ** -0.5)  # s = 10
    assert rule.update_multiplier(10) == pytest.approx((1 - 1 / 4) ** -0.5)  # s = 1
    with pytest.raises(ConfigError, match="expected more than half of that"):
        adaptive(noise_multiplier=1.0, count_noise_stddev=0.5).check(cohort_size=10)


def test_a_rounds_noise_is_scaled_by_the_norm_that_clipped_it(tmp_path: Path) -> None:
    replies = [reply(k, update) for k, update in enumerate(updates(4))]
    moves = []
    for z in (0.0, 1.0):
        privacy = adaptive(noise_multiplier=z, initial_clip_norm=0.5, clip_lr=5.0, sampling="public")
        privacy.open(tmp_path, cohort_size=4, expected=False)
        moves.append(move(gathered(privacy, replies)))
        assert privacy.clip_norm != 0.5
    assert within(moves[1] - moves[0], std=adaptive(noise_multiplier=1.0).update_multiplier(4) * 0.5 / 4)


def test_the_norm_is_checkpointed() -> None:
    rule, other = adaptive(initial_clip_norm=2.0), adaptive()
    after(rule, 10)
    other.load_state_dict(rule.state_dict())
    assert other.clip_norm == rule.clip_norm != 2.0
