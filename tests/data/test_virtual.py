"""Virtual clients: each has its own samples, distributed as specified, at no cost before they are requested."""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedsign.config import from_dict
from fedsign.data.base import IntArray, Samples
from fedsign.data.partition.base import Split
from fedsign.data.partition.lazy import NUM_COUNTED, LazyShares, counted_clients
from fedsign.data.partition.virtual import draw_counts, virtual
from fedsign.errors import ConfigError, DataError
from fedsign.report.page import write_report
from fedsign.report.population import Population
from fedsign.workload import Workload, check_partition
from simulations import partition_view, run

MILLION = 1_000_000
MIB = 2**20


def samples(*class_sizes: int) -> Samples:
    """Samples without features, in random order of their labels."""
    labels = np.random.default_rng(7).permutation(np.repeat(np.arange(len(class_sizes)), class_sizes))
    return Samples(features=torch.zeros(len(labels), 0), targets=torch.from_numpy(labels))


def shares(train: Samples, num_clients: int, *, seed: int = 0, **chosen: Any) -> Split:
    return virtual(train, num_clients, np.random.default_rng(seed), **chosen)


def counts_of(split: Split, train: Samples) -> IntArray:
    """Samples of each class at each client, [K, C]."""
    labels = train.targets.numpy()
    return np.array([np.bincount(labels[index], minlength=labels.max() + 1) for index in split.indices])


CASES = st.fixed_dictionaries(
    {
        "labels": st.sampled_from(["dirichlet", "iid"]),
        "alpha": st.sampled_from([1e-300, 0.01, 0.5, 100.0, 1e12]),
        "samples_per_client": st.integers(1, 20),
        "max_samples": st.sampled_from([0, 20, 25]),
    }
)


@settings(max_examples=60, deadline=None)
@given(chosen=CASES, seed=st.integers(0, 50), asked=st.lists(st.integers(0, 29), min_size=1, max_size=20))
def test_a_share_depends_neither_on_the_population_nor_on_who_was_asked_before(
    chosen: dict[str, Any], seed: int, asked: list[int]
) -> None:
    train = samples(9, 4, 0, 12)
    in_order = list(shares(train, 30, seed=seed, **chosen).indices)
    of_many = shares(train, MILLION, seed=seed, **chosen).indices
    for client in asked:
        assert np.array_equal(of_many[client], in_order[client])
    for index in in_order:
        assert len(np.unique(index)) == len(index) and index.min() >= 0 and index.max() < len(train)
        assert chosen["samples_per_client"] <= len(index)
        assert len(index) <= (chosen["max_samples"] or chosen["samples_per_client"])


def test_a_client_draws_from_its_own_child_of_the_partitions_stream() -> None:
    """As NumPy spawns them; the generator itself may have been used before."""
    rng = np.random.default_rng(3)
    rng.random(5)
    split = virtual(samples(30, 30), 8, rng, labels="iid", samples_per_client=4, max_samples=9)
    for client, own in enumerate(np.random.default_rng(3).spawn(8)):
        size = own.integers(4, 9, endpoint=True)
        assert np.array_equal(split.indices[client], np.sort(own.choice(60, size=size, replace=False)))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_label_counts_have_the_mean_and_the_variance_of_the_dirichlet_multinomial_law(alpha: float) -> None:
    """With A = alpha C, n samples and class shares p: mean n p, variance n p (1 - p) (n + A) / (1 + A)."""
    train, num_clients, n = samples(60, 40, 100), 4000, 25
    counts = counts_of(shares(train, num_clients, alpha=alpha, samples_per_client=n), train)
    p, total = np.array([0.3, 0.2, 0.5]), 3 * alpha
    variance = n * p * (1 - p) * (n + total) / (1 + total)
    assert np.abs((counts.mean(axis=0) - n * p) / np.sqrt(variance / num_clients)).max() < 4.5
    fourth = ((counts - n * p) ** 4).mean(axis=0)
    error = np.sqrt((fourth - variance**2) / num_clients)  # of a variance about a known mean
    assert np.abs((((counts - n * p) ** 2).mean(axis=0) - variance) / error).max() < 4.5


def test_iid_clients_and_those_of_a_huge_alpha_hold_the_mix_of_the_whole() -> None:
    """Without replacement: hypergeometric, of variance n p (1 - p) (N - n) / (N - 1); by label: multinomial."""
    train, num_clients, n = samples(60, 40, 100), 4000, 25
    p = np.array([0.3, 0.2, 0.5])
    for chosen, variance in (
        ({"labels": "iid"}, n * p * (1 - p) * (200 - n) / 199),
        ({"alpha": 1e12}, n * p * (1 - p)),
    ):
        counts = counts_of(shares(train, num_clients, samples_per_client=n, **chosen), train)
        assert np.abs((counts.mean(axis=0) - n * p) / np.sqrt(variance / num_clients)).max() < 4.5
        assert np.abs(counts.var(axis=0) / variance - 1).max() < 4.5 * np.sqrt(2 / num_clients)


def test_a_tiny_alpha_gives_every_client_one_class_as_often_as_it_is_frequent() -> None:
    train = samples(60, 40, 100)
    counts = counts_of(shares(train, 2000, alpha=1e-9, samples_per_client=10), train)
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert stats.chisquare((counts > 0).sum(axis=0), 2000 * np.array([0.3, 0.2, 0.5])).pvalue > 1e-4


@pytest.mark.parametrize("chosen", [{"labels": "iid"}, {"alpha": 1.0}])
def test_every_sample_is_as_likely_as_another_and_every_size_too(chosen: dict[str, Any]) -> None:
    train = samples(50, 50)
    split = shares(train, 4000, samples_per_client=3, max_samples=7, **chosen)
    sizes = np.bincount([len(index) for index in split.indices])[3:]
    assert len(sizes) == 5 and stats.chisquare(sizes).pvalue > 1e-4
    used = np.bincount(np.concatenate(list(split.indices)), minlength=100).reshape(-1)
    for label in (0, 1):
        assert stats.chisquare(used[train.targets.numpy() == label]).pvalue > 1e-4


@settings(max_examples=200, deadline=None)
@given(there=st.lists(st.integers(1, 12), min_size=1, max_size=6), data=st.data(), seed=st.integers(0, 100))
def test_a_class_that_runs_out_is_made_up_for_by_the_others(there: list[int], data: st.DataObject, seed: int) -> None:
    size = data.draw(st.integers(1, sum(there)))
    q = np.random.default_rng(seed).dirichlet(np.full(len(there), 0.1))
    if data.draw(st.booleans()):
        q[q < q.max()] = 0.0  # all others have probability 0
        q /= q.sum()
    counts = draw_counts(size, q, np.array(there), np.random.default_rng(seed))
    plain = np.random.default_rng(seed).multinomial(size, q / q.sum())
    assert counts.sum() == size and (counts <= there).all() and (counts >= 0).all()
    assert (counts >= np.minimum(plain, there)).all()
    if (plain <= there).all():
        assert np.array_equal(counts, plain)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"samples_per_client": 11}, r"samples_per_client=11 was given, but there are 10 training samples.*lower it"),
        ({"samples_per_client": 2, "max_samples": 99}, r"max_samples=99 was given.*lower it"),
        ({"samples_per_client": 5, "max_samples": 4}, r"max_samples=4 is below .*=5"),
    ],
)
def test_shares_that_cannot_be_are_refused(chosen: dict[str, int], said: str) -> None:
    with pytest.raises(DataError, match=said):
        shares(samples(5, 5), 3, **chosen)


def test_real_targets_have_no_label_skew_but_can_be_drawn_from_all_alike() -> None:
    train = Samples(features=torch.zeros(30, 0), targets=torch.linspace(0, 1, 30))
    with pytest.raises(DataError, match=r"virtual needs class labels.*partition.labels=iid\."):
        shares(train, 3)
    assert len(shares(train, 3, labels="iid").indices[2]) == 20


@pytest.mark.parametrize("setting", ["labels=uniform", "alpha=0", "samples_per_client=0", "max_samples=-1"])
def test_settings_out_of_their_range_are_refused(setting: str) -> None:
    key, _, value = setting.partition("=")
    with pytest.raises(ConfigError, match=rf"partition\.{key}=.*{value}.* was given, but expected"):
        from_dict({"partition": {"name": "virtual", key: value if key == "labels" else int(value)}})


def test_lazy_shares_are_a_sequence_that_draws_on_use_and_keeps_what_it_drew() -> None:
    asked: list[int] = []

    def draw(client: int) -> IntArray:
        asked.append(client)
        return np.array([client])

    lazy = LazyShares(MILLION, draw, largest=1)
    assert len(lazy) == MILLION and not asked
    assert lazy[7] is lazy[7] and lazy[-1].tolist() == [MILLION - 1] and asked == [7, MILLION - 1]
    assert [share.tolist() for share in lazy[:4:2]] == [[0], [2]]
    for wrong in (MILLION, -MILLION - 1):
        with pytest.raises(IndexError):
            lazy[wrong]


def test_all_clients_are_counted_where_they_are_few_or_lie_there_and_evenly_spaced_ones_elsewhere() -> None:
    few, many = (LazyShares(num, lambda client: np.array([client]), largest=1) for num in (NUM_COUNTED, MILLION))
    assert list(counted_clients(few)) == list(range(NUM_COUNTED))
    assert len(counted_clients([np.array([0])] * 5000)) == 5000
    counted = counted_clients(many)
    assert (counted[0], counted[-1], len(set(counted))) == (0, MILLION - 1, NUM_COUNTED)
    assert set(np.diff(counted)) <= {1000, 1001, 1002}


@pytest.mark.parametrize(
    ("share", "said"), [([], "500 of them empty"), ([3, 3], "twice to one client"), ([-1], "does not exist")]
)
def test_a_lazy_partition_is_looked_at_where_it_is_counted(share: list[int], said: str) -> None:
    def draw(client: int) -> IntArray:
        return np.array(share if client >= MILLION // 2 else [1, 2], dtype=np.int64)

    with pytest.raises(DataError, match=said):
        check_partition(
            LazyShares(MILLION, draw, largest=2), num_clients=MILLION, num_samples=9, name="mine", is_shared=True
        )


def experiment(num_clients: int, **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "callbacks": [],
        "partition": {"name": "virtual", "num_clients": num_clients, "max_samples": 30},
        "client": {"local_epochs": 1},
        "model": {"name": "mlp", "hidden": [8]},
        **changes,
    }


@pytest.mark.needs("cohort")
def test_the_largest_share_is_known_without_making_any() -> None:
    from clients.cohort.paths import chunk_of

    work = Workload(from_dict(experiment(MILLION)))
    assert work.split.largest == 30 and chunk_of(work) == 10
    assert isinstance(work.partition, LazyShares)
    assert work.partition._draw.cache_info().misses == NUM_COUNTED, "the check looks at the counted clients"


def test_facts_about_a_million_clients_are_of_those_that_were_counted() -> None:
    small, large = (partition_view.describe(Workload(from_dict(experiment(num)))) for num in (NUM_COUNTED, MILLION))
    assert "counted_clients" not in small and small["samples_are_shared"] and large["samples_are_shared"]
    assert (small["clients"], large["clients"], large["num_clients"]) == (NUM_COUNTED, MILLION, MILLION)
    assert len(small["counts"]) == len(large["counts"]) == len(large["counted_clients"]) == NUM_COUNTED
    assert small["counts"][0] == large["counts"][0]
    assert large["samples"]["total"] == 1437 and large["samples"]["left_out"] == 0
    said = {name: (value, remark) for name, value, remark in partition_view.rows(large)}
    assert said["clients"] == ("1,000,000", "the figures are of 1,000, evenly spaced from the first to the last")
    assert "from all of them" in said["training samples"][1]
    assert json.loads(json.dumps(large)) == large


def test_the_record_and_the_page_of_a_run_say_who_was_counted(tmp_path: Path) -> None:
    done = run(experiment(MILLION, results={"root": str(tmp_path)}))
    record = done.folder.partition
    assert record["num_clients"] == MILLION and record["counted_clients"][-1] == MILLION - 1
    page = " ".join(write_report(done.folder).read_text(encoding="utf-8").split())
    assert "1,000,000 clients that draw their samples from the same ones." in page
    assert "1,000 clients were counted, evenly spaced from the first to the last" in page
    assert "In 2 rounds 20 of 1,000,000 clients took part, none of them twice." in page
    assert "times sampled" not in page, "hardly a client that is drawn was ever sampled"
    clients = Population.of(record, sampled={5: 3, 999_999: 1}, num_rounds=4)
    assert clients.participation_sentence().endswith("clients took part, the one that did most often 3 times.")


@contextmanager
def traced_peak() -> Iterator[list[int]]:
    """The most bytes that Python and NumPy held at once inside the block."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def test_a_run_of_a_million_clients_takes_the_memory_of_one_of_a_thousand(tmp_path: Path) -> None:
    """A list of the clients would be 8 MB, their numbers 28 MB more, their shares over 100 MB."""
    peaks = {}
    for num_clients in (NUM_COUNTED, NUM_COUNTED, MILLION):  # the first to warm up
        with traced_peak() as peak:
            run(
                experiment(
                    num_clients,
                    strategy={"name": "feddyn"},
                    client={"local_epochs": 1, "path": "auto"},
                    results={"root": str(tmp_path)},
                )
            )
        (peaks[num_clients],) = peak
    assert peaks[MILLION] - peaks[NUM_COUNTED] < 2 * MIB, peaks
