"""The plan of PaRO: ownership, memory and time; expected numbers from the paper's formulas."""

import json
import math
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsign.errors import ConfigError
from fedsign.sharding.layout import Cut, Granularity, Grouping
from fedsign.sharding.plan import Estimate, Standing, Task, rank
from fedsign.sharding.strategy import PAPER, STRATEGIES, Collective, Operation, Scope, strategy_of
from fedsign.sharding.traffic import Count, Link, Network, Rings, planned, seconds
from simulations.sharding.estimate import Options, estimate, with_network
from tests.e2e.command import fedsign

GB = 1e9
PAPER_NETWORK = Network(intra_bps=2000e9, inter_bps=80e9)
PAPER_GROUPING = Grouping(groups=4, per_group=8)
groupings = st.builds(Grouping, groups=st.integers(1, 6), per_group=st.integers(1, 6))


Ranking = list[tuple[Standing, Estimate]]


def ranking_of(params: float, share: float, *, names: tuple[str, ...] = tuple(STRATEGIES)) -> Ranking:
    """In the paper's setting: 4 machines of 8 GPUs with 80 GB, 10 micro-batches a step, without computation."""
    task = Task(params=params, trainable=share * params, accumulate=10)
    return rank(task, grouping=PAPER_GROUPING, network=PAPER_NETWORK, memory_bytes=80 * GB, names=names)


def by_name(ranking: Ranking) -> dict[str, Estimate]:
    return {each.strategy.name: each for _, each in ranking}


def fitting(ranking: Ranking) -> list[Estimate]:
    return [each for standing, each in ranking if standing != "too_large"]


def in_order_of_time(ranking: Ranking) -> list[str]:
    return [each.strategy.name for each in sorted(fitting(ranking), key=lambda each: each.step_s)]


def test_the_rule_keeps_the_papers_fourteen_of_twenty_seven() -> None:
    dropped = ["NIN", "NGN", "NGI", "INN", "IIN", "IGN", "IGI", "GNN", "GNI", "GIN", "GII", "GGN", "GGI"]
    every = {"".join(letters) for letters in product("NIG", repeat=3)}
    assert {*STRATEGIES} == every - {*dropped}
    assert len(STRATEGIES) == 14
    assert {*PAPER} <= {*STRATEGIES}
    for name in dropped:
        with pytest.raises(ConfigError, match="coarser than parameters or gradients"):
            strategy_of(name)


def test_an_unknown_strategy_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'ZERO' was given; choose one of NNN, NNI"):
        strategy_of("ZERO")


@given(grouping=groupings, numel=st.integers(0, 200))
def test_a_rank_owns_as_many_elements_as_any_other_and_all_ranks_own_all(grouping: Grouping, numel: int) -> None:
    cut = Cut(numel=numel, grouping=grouping)
    assert 0 <= cut.padded - cut.numel < grouping.ranks
    for granularity in Granularity:
        spans = [cut.span(each, granularity) for each in range(grouping.ranks)]
        assert {stop - start for start, stop in spans} == {cut.num_owned(granularity)}
        covered = sorted(place for start, stop in spans for place in range(start, stop))
        copies = grouping.ranks // grouping.split(granularity)
        assert covered == [place for place in range(cut.padded) for _ in range(copies)]


@given(grouping=groupings)
def test_the_group_partition_is_the_union_of_its_global_blocks_over_the_groups(grouping: Grouping) -> None:
    for local in range(grouping.per_group):
        peers = grouping.peer_ranks(local)
        union = {grouping.block_of(peer) for peer in peers}
        for peer in peers:
            assert {*grouping.blocks_of(peer, Granularity.GROUP)} == union
        # in this very order, so that gathering between groups fills the partition
        assert [grouping.block_of(peer) for peer in peers] == sorted(union)
    held = [{*grouping.blocks_of(each, Granularity.GROUP)} for each in grouping.group_ranks(0)]
    assert set().union(*held) == {*range(grouping.ranks)}
    assert not any(one & other for one, other in combinations(held, 2))


@pytest.mark.parametrize(("ranks", "per_group"), [(6, 4), (0, 1), (4, 0), (4, -2)])
def test_groups_of_different_sizes_are_refused(ranks: int, per_group: int) -> None:
    with pytest.raises(ConfigError, match=r"ranks"):
        Grouping.of(ranks=ranks, per_group=per_group)


# The specification's table: t_comm in seconds and GB of a rank; (params, share trained) -> strategy -> figures.
TABLE: dict[tuple[float, float], dict[str, tuple[float, float | None]]] = {
    (7e9, 1.0): {
        "NNI": (0.36, 38.5),
        "NII": (0.80, 26.2),
        "INI": (1.29, 26.2),
        "III": (1.73, 14.0),
        "IIG": (1.73, 6.1),
        "NIG": (1.98, 18.4),
        "ING": (2.47, None),
        "NNG": (2.71, None),
        "IGG": (14.7, None),
        "NGG": (14.9, None),
        "GIG": (27.7, None),
        "GNG": (28.5, None),
        "GGG": (40.7, None),
    },
    (65e9, 1.0): {"IIG": (16.1, 56.9), "IGG": (136, 44.7), "GIG": (258, 44.7), "GGG": (378, 32.5)},
    (7e9, 1 / 16): {
        "NNI": (0.023, 15.5),
        "NII": (0.050, 14.8),
        "NIG": (0.124, 14.3),
        "NNG": (0.17, None),
        "NNN": (0.17, None),
        "NGG": (0.93, None),
        "INI": (1.00, None),
        "III": (1.03, None),
        "IIG": (1.03, None),
        "ING": (1.07, None),
        "IGG": (1.84, None),
    },
    (65e9, 1 / 16): {
        "INI": (9.28, 30.5),
        "IIG": (9.54, 18.8),
        "III": (9.54, 23.4),
        "ING": (9.96, None),
        "IGG": (17.0, None),
    },
    (65e9, 3 / 1000): {
        "INI": (9.11, None),
        "III": (9.12, None),
        "IIG": (9.12, None),
        "ING": (9.14, None),
        "IGG": (9.48, None),
    },
}


@pytest.mark.parametrize(("params", "share"), TABLE)
def test_the_formulas_give_the_table_of_the_papers_five_scenarios(params: float, share: float) -> None:
    ranking = ranking_of(params, share)
    found = by_name(ranking)
    for name, (time_s, memory_gb) in TABLE[params, share].items():
        decimals = max(0, 2 - math.floor(math.log10(time_s)))
        assert found[name].communication_s == pytest.approx(time_s, abs=0.6 * 10.0**-decimals + 0.005), name
        if memory_gb is not None:
            assert found[name].memory_bytes / GB == pytest.approx(memory_gb, abs=0.06), name
    # the rest of those that fit gather the whole model over the slow links
    rest = {each.strategy.name for each in fitting(ranking)} - TABLE[params, share].keys()
    assert all(name.startswith("G") for name in rest)


def test_of_65_billion_only_what_shards_all_three_states_fits_80_gb() -> None:
    assert {each.strategy.name for each in fitting(ranking_of(65e9, 1.0))} == {"IIG", "IGG", "GIG", "GGG"}
    assert by_name(ranking_of(65e9, 1.0))["III"].memory_bytes == pytest.approx(130 * GB)


# The relative throughputs of the paper's section 4: a > b where the paper says that a is faster.
PROSE = [
    (7e9, 1.0, ["NII", "IIG", "GGG"]),
    (7e9, 1.0, ["NII", "NGG"]),
    (65e9, 1.0, ["IIG", "IGG", "GGG"]),
    (7e9, 1 / 16, ["NII", "NIG", "NGG"]),
    (65e9, 1 / 16, ["IIG", "GGG"]),
    (65e9, 3 / 1000, ["ING", "GGG"]),
]


@pytest.mark.parametrize(("params", "share", "order"), PROSE)
def test_among_the_papers_candidates_the_order_is_the_papers(params: float, share: float, order: list[str]) -> None:
    found = in_order_of_time(ranking_of(params, share, names=PAPER))
    assert [name for name in found if name in order] == order


def test_the_formulas_prefer_what_the_paper_did_not_run_and_the_papers_candidates_leave_it_out() -> None:
    assert in_order_of_time(ranking_of(7e9, 1.0))[0] == "NNI"
    assert in_order_of_time(ranking_of(65e9, 1 / 16))[0] == "INI"
    assert in_order_of_time(ranking_of(7e9, 1.0, names=PAPER))[0] == "NII"


def test_near_strategies_stand_first_with_the_cheapest_in_memory_at_the_top() -> None:
    ranking = ranking_of(65e9, 3 / 1000)
    fastest = min(each.step_s for each in fitting(ranking))
    near = [each for standing, each in ranking if standing == "near"]
    assert [each.strategy.name for each in near] == ["IGG", "IIG", "III", "ING", "INI"]
    assert near == [each for _, each in ranking[: len(near)]]
    assert all(each.step_s <= 1.05 * fastest for each in near)
    assert all(each.step_s > 1.05 * fastest for standing, each in ranking if standing == "slower")


def test_where_computation_hides_all_communication_memory_alone_decides() -> None:
    task = Task(params=7e9, trainable=7e9, accumulate=10)
    ranking = rank(task, grouping=PAPER_GROUPING, network=PAPER_NETWORK, memory_bytes=80 * GB, compute_s=1000.0)
    assert ranking[0][1].strategy.name == "GGG"
    assert {standing for standing, _ in ranking} == {"near", "too_large"}


@given(
    grouping=groupings,
    block=st.integers(1, 1000),
    operation=st.sampled_from([each for each in Operation if each is not Operation.EXCHANGE]),
)
def test_two_level_rings_send_as_many_bytes_and_at_most_as_many_between_groups(
    grouping: Grouping, block: int, operation: Operation
) -> None:
    """Flat: n - 1 blocks leave a group, on one rank's link.  Two-level: g - 1 blocks of each of its m ranks."""

    def sent(rings: Rings) -> Count:
        collective = Collective(scope=Scope.ALL, operation=operation)
        ranks = grouping.group_ranks(0)
        each = [planned(collective, rank=r, block_bytes=block, grouping=grouping, rings=rings) for r in ranks]
        return sum(each, start=Count())

    flat, two_level = sent(Rings.FLAT), sent(Rings.TWO_LEVEL)
    assert flat.intra_bytes + flat.inter_bytes == two_level.intra_bytes + two_level.inter_bytes
    passes = 2 if operation is Operation.ALL_REDUCE else 1
    m, g, n = grouping.per_group, grouping.groups, grouping.ranks
    assert flat.inter_bytes == (passes * (n - 1) * block if g > 1 else 0)
    assert two_level.inter_bytes == passes * m * (g - 1) * block
    assert two_level.inter_bytes <= max(flat.inter_bytes, 0)


def test_for_two_groups_of_two_two_level_rings_send_two_thirds_over_the_slow_link() -> None:
    grouping = Grouping(groups=2, per_group=2)
    gather = Collective(scope=Scope.ALL, operation=Operation.ALL_GATHER)
    sent = {
        rings: sum(planned(gather, rank=r, block_bytes=3, grouping=grouping, rings=rings).inter_bytes for r in (0, 1))
        for rings in Rings
    }
    assert 3 * sent[Rings.TWO_LEVEL] == 2 * sent[Rings.FLAT]


@given(grouping=groupings)
def test_no_bandwidth_is_exceeded_by_what_is_sent(grouping: Grouping) -> None:
    """A time is at least the bytes on each link over its bandwidth, with equality where the rings have one level."""
    size = 8 * grouping.ranks
    for scope, operation, rings, link in product(Scope, Operation, Rings, Link):
        network = Network(intra_bps=200.0, inter_bps=10.0, rings=rings, link=link)
        collective = Collective(scope=scope, operation=operation)
        taken = seconds(collective, tensor_bytes=size, grouping=grouping, network=network)
        sent = [
            planned(collective, rank=r, block_bytes=8, grouping=grouping, rings=rings) for r in range(grouping.ranks)
        ]
        across = [each.inter_bytes for each in sent]
        if link is Link.GROUP:
            across = [sum(across[r] for r in grouping.group_ranks(first)) for first in range(grouping.ranks)]
        least = max(max(8 * each.intra_bytes / 200.0 for each in sent), max(8 * each / 10.0 for each in across))
        assert taken >= least * (1 - 1e-12)
        if scope is not Scope.ALL:
            assert taken == pytest.approx(least)


def test_a_link_that_a_group_shares_takes_as_many_times_longer_as_ranks_share_it() -> None:
    gather = Collective(scope=Scope.INTER, operation=Operation.ALL_GATHER)
    own = seconds(gather, tensor_bytes=1e9, grouping=PAPER_GROUPING, network=PAPER_NETWORK)
    shared = Network(intra_bps=2000e9, inter_bps=80e9, link=Link.GROUP)
    assert seconds(gather, tensor_bytes=1e9, grouping=PAPER_GROUPING, network=shared) == pytest.approx(8 * own)


def asked(**changed: Any) -> Options:
    given = {
        "params": 7e9,
        "trainable": "1",
        "ranks": 32,
        "per_group": 8,
        "intra": "2000Gbps",
        "inter": "80Gbps",
        "memory": "80GB",
    }
    given |= {"accumulate": 10, "t_comp": 0.0, "link": "rank", "collectives": "flat", "candidates": "all"}
    given |= {"measure": False, "out": None, "json": True}
    return Options(**given | changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"memory": "80"}, "--memory 80 was given; expected a number above 0 with a unit"),
        ({"inter": "80GB"}, "--inter 80GB was given"),
        ({"trainable": "2"}, "--trainable 2 was given; expected a fraction above 0 and at most 1"),
        ({"trainable": "1/0"}, "--trainable 1/0 was given"),
        ({"per_group": 5}, "32 ranks were given in groups of 5"),
        ({"accumulate": 0}, "accumulate=0 was given"),
        ({"t_comp": -1.0}, "--t-comp -1 was given"),
        ({"params": 0.0}, "--params 0 was given"),
        ({"link": "node"}, "--link node was given; expected one of rank, group"),
        ({"collectives": "nccl"}, "--collectives nccl was given; expected one of flat, two-level"),
        ({"candidates": "best"}, "--candidates best was given; expected one of all, paper"),
    ],
)
def test_an_option_without_meaning_is_an_error_that_says_what_is_expected(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        estimate(asked(**changed))
    assert said in str(raised.value)


NOTHING: dict[str, Any] = {"ranks": None, "intra": None, "inter": None, "link": None}


def test_a_network_that_was_said_needs_no_ranks_to_run() -> None:
    assert with_network(asked(link=None)) == asked(link="rank")


@pytest.mark.parametrize(
    ("changed", "measure", "why"),
    [
        (NOTHING, False, "--ranks, --intra, --inter were not given"),
        ({"inter": None}, False, "--inter was not given"),
        ({"intra": None, "inter": None}, True, "--measure was given with --ranks, --link, which it measures"),
        (NOTHING, True, "--measure was given without ranks to measure between"),
    ],
)
def test_a_network_is_said_or_measured(
    changed: dict[str, Any], measure: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError) as raised:
        with_network(asked(**changed, measure=measure))
    assert why in str(raised.value)


COMMAND = "estimate sharding --ranks 32 --per-group 8 --intra 2000Gbps --inter 80Gbps --memory 80GB --accumulate 10"


def test_the_command_prints_the_table_and_draws_the_picture(tmp_path: Path) -> None:
    done = fedsign(*COMMAND.split(), "--params", "65e9", "--trainable", "1/16", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if line[:3] in STRATEGIES]
    assert rows[:4] == ["IIG", "III", "INI", "ING"]
    assert len(rows) == 14
    assert "take IIG" in done.stdout
    picture = (tmp_path / "sharding.svg").read_text(encoding="utf-8")
    assert picture.count(", does not fit") == 6 and all(f"{name}: " in picture for name in STRATEGIES)


def test_json_has_the_numbers_and_writes_no_file(tmp_path: Path) -> None:
    done = fedsign(*COMMAND.split(), "--params", "65e9", "--candidates", "paper", "--json", folder=tmp_path)
    told = json.loads(done.stdout)
    assert told["recommended"] == "IIG"
    assert [each["strategy"] for each in told["strategies"]][:3] == ["IIG", "IGG", "GGG"]
    assert told["strategies"][0]["communication_s"] == pytest.approx(16.1, abs=0.05)
    assert not list(tmp_path.iterdir())


def test_where_nothing_fits_the_least_is_named(tmp_path: Path) -> None:
    done = fedsign(*COMMAND.split(), "--params", "1e12", "--out", "none.svg", folder=tmp_path)
    assert done.returncode == 0 and (tmp_path / "none.svg").stat().st_size > 2000
    assert "nothing fits" in done.stdout and "GGG" in done.stdout
