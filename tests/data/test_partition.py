"""Partitions are disjoint, cover all samples, keep what their names promise, and report moved samples."""

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsign.data.base import IntArray, Samples
from fedsign.data.partition.base import Split, label_distance, split_of
from fedsign.data.partition.classes import classes
from fedsign.data.partition.dirichlet import dirichlet, draw_counts, fill_up, max_draws
from fedsign.data.partition.iid import iid
from fedsign.data.partition.natural import natural
from fedsign.data.partition.prefix import dirichlet_prefix, quantity_prefix
from fedsign.data.partition.quantity import quantity
from fedsign.data.partition.shards import shards
from fedsign.errors import DataError
from fedsign.registry import KINDS, resolve

ROWS = list(KINDS["partition"].table)
SHARED = ["virtual"]  # clients share samples: tests/data/test_virtual.py
NOT_DEALT = ["sites"]  # clients have samples of their own: tests/deployment/test_sites.py


def samples(num: int, num_classes: int = 10, *, num_owners: int = 0) -> Samples:
    """`num` samples without features, labeled, and owned, at random."""
    rng = np.random.default_rng(7)
    labels = rng.integers(num_classes, size=num)
    owners = torch.from_numpy(rng.integers(num_owners, size=num)) if num_owners else None
    return Samples(features=torch.zeros(num, 0), targets=torch.from_numpy(labels), owners=owners)


def assert_disjoint_and_covering(parts: Sequence[IntArray], num: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num))


def counts_of(split: Split, labels: IntArray) -> IntArray:
    """Samples of each class at each client, [K, C]."""
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in split.indices])


@st.composite
def a_case(draw: st.DrawFn) -> tuple[Samples, int, dict[str, dict[str, Any]]]:
    """Samples, a number of clients, and settings for each row that these samples allow.

    Every class has 4 samples for each client at least, and there are as many owners as clients at least.
    """
    num_clients, num_classes = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    spare = draw(st.lists(st.integers(0, num_classes - 1), max_size=40))
    labels = np.concatenate([np.repeat(np.arange(num_classes), 4 * num_clients), np.array(spare, dtype=np.int64)])
    rng = np.random.default_rng(draw(st.integers(0, 5)))
    num_owners = num_clients + draw(st.integers(0, 10))
    owners = np.concatenate([np.arange(num_clients), rng.integers(num_owners, size=len(labels) - num_clients)])
    train = Samples(
        features=torch.zeros(len(labels), 0),
        targets=torch.from_numpy(rng.permutation(labels)),
        owners=torch.from_numpy(rng.permutation(owners)),
    )
    skew = {"alpha": draw(st.sampled_from([0.01, 0.1, 1.0, 100.0])), "min_partition_size": draw(st.integers(1, 4))}
    return (
        train,
        num_clients,
        {
            "dirichlet": skew,
            "quantity": skew,
            "dirichlet_prefix": skew,
            "quantity_prefix": skew,
            "shards": {"shards_per_client": draw(st.integers(1, 4))},
            "classes": {"classes_per_client": draw(st.integers(-(-num_classes // num_clients), num_classes))},
        },
    )


@pytest.mark.parametrize("name", [name for name in ROWS if name not in SHARED + NOT_DEALT])
@settings(max_examples=40, deadline=None)
@given(case=a_case(), seed=st.integers(0, 100))
def test_every_partition_deals_every_sample_out_once_and_the_seed_alone_decides(
    name: str, case: tuple[Samples, int, dict[str, dict[str, Any]]], seed: int
) -> None:
    train, num_clients, settings_of = case
    partition, chosen = resolve("partition", name), settings_of.get(name, {})
    first, again = (partition(train, num_clients, np.random.default_rng(seed), **chosen) for _ in range(2))
    assert len(first.indices) == num_clients
    assert_disjoint_and_covering(first.indices, len(train))
    assert min(map(len, first.indices)) >= chosen.get("min_partition_size", 1)
    assert all(np.array_equal(a, b) for a, b in zip(first.indices, again.indices, strict=True))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in NOT_DEALT])
def test_another_seed_is_another_split(name: str) -> None:
    train, partition = samples(500, num_owners=40), resolve("partition", name)
    first, other = (partition(train, 10, np.random.default_rng(seed)).indices for seed in (3, 4))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@given(num_clients=st.integers(1, 50), spare=st.integers(0, 200), seed=st.integers(0, 100))
def test_iid_parts_differ_by_one_at_most(num_clients: int, spare: int, seed: int) -> None:
    sizes = [len(part) for part in iid(samples(num_clients + spare), num_clients, np.random.default_rng(seed)).indices]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(case=a_case(), seed=st.integers(0, 100))
def test_shards_are_equal_and_meet_few_classes(case: tuple[Samples, int, dict[str, dict[str, Any]]], seed: int) -> None:
    """A client's shards hold floor or ceil of n / (K s) samples each.  C - 1 borders between classes lie inside one
    shard each at most, so that clients and classes meet in K s + C - 1 pairs at most; a client in 2 s, where no
    class (4 K samples at least) is smaller than a shard."""
    train, num_clients, settings_of = case
    labels, each = train.targets.numpy(), settings_of["shards"]["shards_per_client"]
    split = shards(train, num_clients, np.random.default_rng(seed), shards_per_client=each)
    num_shards, num_classes = num_clients * each, labels.max() + 1
    for part in split.indices:
        assert each * (len(train) // num_shards) <= len(part) <= each * math.ceil(len(train) / num_shards)
    held = (counts_of(split, labels) > 0).sum(axis=1)
    assert held.sum() <= num_shards + num_classes - 1
    if np.bincount(labels).min() >= math.ceil(len(train) / num_shards):
        assert held.max() <= 2 * each


def test_mcmahans_shards_give_a_client_one_or_two_of_ten_classes() -> None:
    """Section 3: 100 clients, 2 shards of 300.  6,000 of each class: no shard spans two, so two classes at most."""
    train = Samples(features=torch.zeros(60_000, 0), targets=torch.arange(60_000) % 10)
    split = shards(train, 100, np.random.default_rng(0))
    assert {len(part) for part in split.indices} == {600}
    held = (counts_of(split, train.targets.numpy()) > 0).sum(axis=1)
    assert set(held) == {1, 2}


def test_shards_of_a_regression_are_neighbors_in_the_target() -> None:
    targets = torch.from_numpy(np.random.default_rng(0).permutation(12).astype(np.float32))
    train = Samples(features=torch.zeros(12, 0), targets=targets)
    held = [
        sorted(targets[part].tolist())
        for part in shards(train, 4, np.random.default_rng(0), shards_per_client=1).indices
    ]
    assert sorted(held) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@settings(max_examples=60, deadline=None)
@given(case=a_case(), seed=st.integers(0, 100))
def test_every_client_holds_k_classes_and_holders_share_a_class_equally(
    case: tuple[Samples, int, dict[str, dict[str, Any]]], seed: int
) -> None:
    train, num_clients, settings_of = case
    each = settings_of["classes"]["classes_per_client"]
    split = classes(train, num_clients, np.random.default_rng(seed), classes_per_client=each)
    counts = counts_of(split, train.targets.numpy())
    assert set((counts > 0).sum(axis=1)) == {each}
    for column in counts.T:
        shares = column[column > 0]
        assert shares.max() - shares.min() <= 1


def test_classes_are_given_in_turn_first() -> None:
    """With one class each, 7 clients hold 3 classes as 3, 2 and 2: NIID-Bench's `client % classes`."""
    split = classes(samples(300, 3), 7, np.random.default_rng(0), classes_per_client=1)
    held = counts_of(split, samples(300, 3).targets.numpy()).argmax(axis=1)
    assert sorted(np.bincount(held)) == [2, 2, 3]
    assert held[:3].tolist() == held[3:6].tolist() and held[6] == held[0]


@pytest.mark.parametrize(("num_clients", "each", "said"), [(4, 2, "at least 3"), (20, 11, "at most 10")])
def test_classes_that_cannot_be_given_are_refused(num_clients: int, each: int, said: str) -> None:
    with pytest.raises(DataError, match=rf"classes_per_client={each} cannot share 10 classes.*{said}"):
        classes(samples(500), num_clients, np.random.default_rng(0), classes_per_client=each)


def test_a_class_too_small_for_its_holders_leaves_nobody_empty_handed_in_silence() -> None:
    train = Samples(features=torch.zeros(12, 0), targets=torch.tensor([0] * 10 + [1] * 2))
    with pytest.raises(DataError, match="leaves 2 of 8 clients without a sample"):
        classes(train, 8, np.random.default_rng(0), classes_per_client=1)


@settings(max_examples=60, deadline=None)
@given(case=a_case(), seed=st.integers(0, 100))
def test_owners_stay_whole_and_are_balanced(case: tuple[Samples, int, dict[str, dict[str, Any]]], seed: int) -> None:
    """Graham's bound: sizes differ by the largest owner at most."""
    train, num_clients, _ = case
    assert train.owners is not None
    owners = train.owners.numpy()
    parts = natural(train, num_clients, np.random.default_rng(seed)).indices
    held = [set(owners[part].tolist()) for part in parts]
    assert sum(map(len, held)) == len(set(owners.tolist())), "no owner is at two clients"
    sizes = [len(part) for part in parts]
    if len(set(owners.tolist())) > num_clients:
        assert max(sizes) - min(sizes) <= np.bincount(owners).max()


def test_with_as_many_owners_as_clients_a_client_is_an_owner() -> None:
    owners = torch.tensor([5, 3, 5, 9, 3, 5])
    train = Samples(features=torch.zeros(6, 0), targets=torch.zeros(6), owners=owners)
    parts = natural(train, 3, np.random.default_rng(0)).indices
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5], [3]]


def test_natural_needs_owners_and_enough_of_them() -> None:
    with pytest.raises(DataError, match="says who owns each sample"):
        natural(samples(20), 2, np.random.default_rng(0))
    with pytest.raises(DataError, match=r"num_clients=11 .* have 10 owners.*num_clients=10 or less"):
        natural(samples(500, num_owners=10), 11, np.random.default_rng(0))


def reference_dirichlet(train: Samples, num_clients: int, seed: int, *, alpha: float, minimum: int) -> list[IntArray]:
    """Draw until the minimum is met, then deal class by class: as it reads in the paper, without a bound."""
    rng, labels = np.random.default_rng(seed), train.targets.numpy()
    by_class = [np.flatnonzero(labels == label) for label in range(10)]
    while True:
        shares = [rng.dirichlet([alpha] * num_clients) for _ in by_class]
        cuts = [(np.cumsum(p)[:-1] * len(index)).astype(int) for p, index in zip(shares, by_class, strict=True)]
        sizes = sum(np.diff([0, *cut, len(index)]) for cut, index in zip(cuts, by_class, strict=True))
        if min(sizes) >= minimum:
            break
    hands: list[list[int]] = [[] for _ in range(num_clients)]
    for cut, index in zip(cuts, by_class, strict=True):
        for hand, part in zip(hands, np.split(rng.permutation(index), cut), strict=True):
            hand.extend(part.tolist())
    return [np.array(sorted(hand)) for hand in hands]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_clients", [1, 7, 40])
def test_the_prefix_cut_is_the_plain_rejection_sampler_where_that_ends(num_clients: int, seed: int) -> None:
    train = samples(1_500)
    split = dirichlet_prefix(train, num_clients, np.random.default_rng(seed), alpha=0.2, min_partition_size=3)
    assert (split.num_moved, split.moved_label_distance) == (0, 0.0)
    expected = reference_dirichlet(train, num_clients, seed, alpha=0.2, minimum=3)
    assert all(np.array_equal(a, b) for a, b in zip(split.indices, expected, strict=True))


def test_the_prefix_cut_of_the_quantities_is_that_of_a_single_class() -> None:
    train, one_class = samples(300), Samples(features=torch.zeros(300, 0), targets=torch.zeros(300, dtype=torch.int64))
    quantities = quantity_prefix(train, 9, np.random.default_rng(1), alpha=0.3)
    alone = dirichlet_prefix(one_class, 9, np.random.default_rng(1), alpha=0.3)
    assert all(np.array_equal(a, b) for a, b in zip(quantities.indices, alone.indices, strict=True))
    assert quantities.moved_label_distance is None


@pytest.mark.parametrize("alpha", [1e-3, 0.1])
def test_a_hard_case_ends_in_time_and_says_what_it_moved(alpha: float) -> None:
    """100 clients, 5,000 samples, minimum 10 of the 50 that a client has on average."""
    train, started_at = samples(5_000), time.monotonic()
    split = dirichlet(train, 100, np.random.default_rng(0), alpha=alpha, min_partition_size=10)
    assert time.monotonic() - started_at < 10
    assert_disjoint_and_covering(split.indices, 5_000)
    assert min(map(len, split.indices)) == 10
    assert split.num_moved > 0
    assert split.moved_label_distance is not None and 0 < split.moved_label_distance < 1


def test_of_draws_that_all_fail_the_one_that_lacks_least_is_filled_up() -> None:
    """The draws are replayed with no minimum; the distance is summed up by hand."""
    train, rng = samples(400, 4), np.random.default_rng(5)
    labels = train.targets.numpy()
    draws = [draw_counts(np.bincount(labels), 40, 0.1, 0, rng, is_prefix=True).T for _ in range(max_draws(4, 40))]
    deficits = [int(sum(max(6 - size, 0) for size in draw.sum(axis=1))) for draw in draws]
    split = dirichlet_prefix(train, 40, np.random.default_rng(5), alpha=0.1, min_partition_size=6)
    assert 0 < split.num_moved == min(deficits) < deficits[-1]
    drawn, dealt = draws[deficits.index(min(deficits))], counts_of(split, labels)
    expected = []
    for before, after in zip(drawn.tolist(), dealt.tolist(), strict=True):
        p, q = ([count / sum(row) for count in row] if sum(row) else None for row in (before, after))
        expected.append(1.0 if p is None or q is None else sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2)
    assert split.moved_label_distance == pytest.approx(np.mean(expected))


def test_many_clients_and_classes_stay_quick() -> None:
    """One draw alone is 100,000 numbers here, so few are drawn."""
    train, started_at = samples(50_000, 100), time.monotonic()
    split = dirichlet(train, 1_000, np.random.default_rng(0), alpha=0.1, min_partition_size=49)
    assert time.monotonic() - started_at < 10
    assert min(map(len, split.indices)) == 49 and split.num_moved > 0


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_a_share_has_the_mean_and_the_variance_of_the_dirichlet_law(alpha: float) -> None:
    """A share is Beta(a, (K-1) a): mean 1/K, variance v = (K-1) / (K^2 (K a + 1)), fourth moment m4.

    Of N independent draws the mean has the standard error sqrt(v / N), the variance about sqrt((m4 - v^2) / N): both
    must lie within five of them.  Cutting a class of 10^7 moves a share by 10^-7 at most.
    """
    num_clients, size = 5, 10**7
    draws = [draw_counts(np.full(100, size), num_clients, alpha, 0, np.random.default_rng(seed)) for seed in range(40)]
    for client in range(num_clients):
        shares = np.concatenate([draw[:, client] for draw in draws]) / size
        variance = (num_clients - 1) / (num_clients**2 * (num_clients * alpha + 1))
        kurtosis = 3 + float(stats.beta(alpha, (num_clients - 1) * alpha).stats(moments="k"))
        assert shares.mean() == pytest.approx(1 / num_clients, abs=5 * math.sqrt(variance / len(shares)))
        error = math.sqrt((kurtosis - 1) * variance**2 / len(shares))
        assert shares.var() == pytest.approx(variance, abs=5 * error)


def test_quantity_skews_sizes_by_the_dirichlet_law_and_labels_not() -> None:
    """Sizes as above, with K = 5, alpha = 1; a draw is rejected with probability K (K-1) / n = 0.002 at most, which
    moves a mean of values in [0, 1] by no more.  Labels: the share of class 0 at a client of n_k samples has the
    standard error sqrt(0.1 x 0.9 / n_k)."""
    train, num_seeds = samples(10_000), 600
    splits = [quantity(train, 5, np.random.default_rng(s), alpha=1.0, min_partition_size=1) for s in range(num_seeds)]
    sizes = np.array([[len(part) for part in split.indices] for split in splits]) / 10_000
    variance = 4 / (25 * 6)
    kurtosis = 3 + float(stats.beta(1, 4).stats(moments="k"))
    assert sizes[:, 0].mean() == pytest.approx(0.2, abs=5 * math.sqrt(variance / num_seeds) + 0.002)
    error = math.sqrt((kurtosis - 1) / num_seeds) * variance
    assert sizes[:, 0].var() == pytest.approx(variance, abs=5 * error + 0.002)
    labels = train.targets.numpy()
    is_zero = (labels == 0).mean()
    for part in splits[0].indices:
        assert (labels[part] == 0).mean() == pytest.approx(is_zero, abs=5 * math.sqrt(0.09 / len(part)))


def test_quantity_says_what_it_moved_but_not_of_which_label() -> None:
    split = quantity(samples(500), 100, np.random.default_rng(0), alpha=0.01, min_partition_size=4)
    assert split.num_moved > 0 and split.moved_label_distance is None
    assert min(map(len, split.indices)) == 4


def test_a_huge_alpha_gives_every_client_the_mix_of_the_whole() -> None:
    """10 classes of 200 among 10 clients: 20 of each for everybody, up to one at each of the two cuts."""
    train = Samples(features=torch.zeros(2_000, 0), targets=torch.arange(2_000) % 10)
    split = dirichlet(train, 10, np.random.default_rng(0), alpha=1e8)
    assert np.abs(counts_of(split, train.targets.numpy()) - 20).max() <= 1


@pytest.mark.parametrize("alpha", [1e-6, 1e6])
def test_extreme_alphas_are_the_limits_of_the_law(alpha: float) -> None:
    """alpha -> 0: a class goes to one client as a whole.  alpha -> infinity: to all in equal shares."""
    sizes = np.full(10, 1_000)
    counts = draw_counts(sizes, 4, alpha, 0, np.random.default_rng(0))
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
    after = fill_up(before, minimum)
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
    assert fill_up(counts, 3).tolist() == [[3, 2, 0], [4, 2, 3]]


def test_what_moving_does_to_labels_is_the_mean_total_variation() -> None:
    """Client 0 goes from (.3, .7) to (3/7, 4/7): 3/7 - .3.  Client 1 stays.  Client 2 had nothing: 1."""
    before = np.array([[3, 2, 0], [7, 2, 0]])
    distance = label_distance(before.T, fill_up(before, 3).T)
    assert distance == pytest.approx((3 / 7 - 0.3 + 0 + 1) / 3)


def test_a_small_alpha_gives_a_client_few_classes() -> None:
    """20 clients, 10 classes of n = 200: a share is Beta(a, 19 a).  a = 100: mean 1/20, standard deviation
    0.005, so a client gets about 10 of every class.  a = 0.1: P(n p < 1) = P(p < 1/200), about
    (1/200)^0.1 / (0.1 B(0.1, 1.9)) = 0.59 / 0.915 = 0.64, so about 3.6 classes of 10."""
    train = samples(2_000)
    labels = train.targets.numpy()

    def mean_num_classes(alpha: float) -> float:
        parts = dirichlet(train, 20, np.random.default_rng(0), alpha=alpha).indices
        return float(np.mean([len(np.unique(labels[part])) for part in parts]))

    assert mean_num_classes(100.0) == 10.0
    assert 2.5 < mean_num_classes(0.1) < 5.0


def test_too_many_clients_are_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match=re.escape("num_clients=26") + ".*min_partition_size=4.* 104 .* 100;"):
        dirichlet(samples(100), 26, np.random.default_rng(0))
    assert len(dirichlet(samples(100), 25, np.random.default_rng(0)).indices) == 25
    with pytest.raises(DataError, match=r"num_clients=101 .* 100 "):
        iid(samples(100), 101, np.random.default_rng(0))
    with pytest.raises(DataError, match=r"num_clients=51 .*shards_per_client=2 .* 102 .* 100;"):
        shards(samples(100), 51, np.random.default_rng(0))
    with pytest.raises(DataError, match=r"num_clients=26 .*min_partition_size=4 .* 104 .* 100;"):
        quantity(samples(100), 26, np.random.default_rng(0))


@pytest.mark.parametrize("partition", [dirichlet, classes])
def test_a_regression_has_no_label_skew(partition: Callable[..., Split]) -> None:
    train = Samples(features=torch.zeros(100, 1), targets=torch.zeros(100))
    with pytest.raises(DataError, match="class labels"):
        partition(train, 2, np.random.default_rng(0))
    for other in (iid, quantity, shards):
        assert_disjoint_and_covering(other(train, 3, np.random.default_rng(0)).indices, 100)


def test_several_targets_a_sample_cannot_be_sorted() -> None:
    train = Samples(features=torch.zeros(10, 1), targets=torch.zeros(10, 2))
    with pytest.raises(DataError, match=r"targets of shape \(2,\)"):
        shards(train, 2, np.random.default_rng(0))


def test_a_plain_sequence_of_indices_is_a_split_as_well() -> None:
    for given_parts in ([[0, 2], [1]], (np.array([0, 2]), np.array([1])), [torch.tensor([0, 2]), torch.tensor([1])]):
        split = split_of(given_parts, name="mine")
        assert [part.tolist() for part in split.indices] == [[0, 2], [1]] and split.num_moved == 0
        assert all(part.dtype == np.int64 for part in split.indices)
    assert split_of(split, name="mine") is split


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (None, "gives a NoneType"),
        ("01", "gives a str"),
        ([[0], [0.5]], "gives client 1 float64 values"),
        ([[[0]]], r"gives client 0 int64 values of shape \(1, 1\)"),
        ([[0], [[1], [2, 3]]], "gives client 1 a list that is no array"),
    ],
)
def test_what_is_no_list_of_indices_is_refused(wrong: object, said: str) -> None:
    with pytest.raises(DataError, match=f"partition.name=mine {said}.*; expected one one-dimensional array"):
        split_of(wrong, name="mine")
