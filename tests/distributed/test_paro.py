"""The engine of PaRO: however it is sharded, the update is that of one process on the whole batch.

Five steps in float64.  Ranks start with different values, so nothing would agree if nothing were sent.
"""

from dataclasses import replace

import pytest
import torch

from fedsign.sharding.layout import Cut
from fedsign.sharding.strategy import STRATEGIES, strategy_of
from fedsign.sharding.traffic import Rings
from tests.distributed.ranks import on_ranks
from tests.distributed.training import Case, Outcome, all_sharded, alone, net_of

CLOSE = 1e-12


def plain(ranks: int, accumulate: int) -> list[Case]:
    return [
        Case(strategy=name, groups=2, per_group=ranks // 2, accumulate=accumulate, rings=rings)
        for name, rings in zip(STRATEGIES, [Rings.TWO_LEVEL, Rings.FLAT] * 7, strict=True)
    ]


EVERYTHING = [
    Case(strategy=name, clip_norm=0.3, freezes=True, masks=True, checkpoints="new", accumulate=2, rings=rings)
    for name, rings in zip(STRATEGIES, [Rings.FLAT, Rings.TWO_LEVEL] * 7, strict=True)
]
ODDITIES = [
    *(Case(strategy=name, checkpoints="reentrant") for name in ("NII", "IIG", "GGG")),
    Case(strategy="GGG", groups=1, per_group=4),
    Case(strategy="NIG", groups=4, per_group=1),
]
HALVES = [
    Case(strategy=name, dtype=torch.bfloat16, reduce_dtype=reduce_dtype, optimizer="sgd", accumulate=2)
    for name in ("NNN", "NII", "NIG", "IIG", "GGG")
    for reduce_dtype in (None, torch.float32)
]
SETS = {
    "2x2": plain(4, 1),
    "2x2, 4 micro-batches": plain(4, 4),
    "2x3": plain(6, 1),
    "clipped, frozen, masked, checkpointed": EVERYTHING,
    "oddities": ODDITIES,
}
Trained = list[tuple[Case, list[Outcome]]]


def train(cases: list[Case], factory: pytest.TempPathFactory) -> Trained:
    """Each case on all of its ranks."""
    by_rank = on_ranks(cases[0].grouping.ranks, all_sharded, cases, folder=factory.mktemp("paro"))
    return [(case, [outcomes[index] for outcomes in by_rank]) for index, case in enumerate(cases)]


@pytest.fixture(
    scope="module", params=["2x2", *(pytest.param(name, marks=pytest.mark.slow) for name in SETS if name != "2x2")]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(SETS[request.param], tmp_path_factory)


def test_the_update_is_that_of_one_process_on_the_whole_batch(trained: Trained) -> None:
    for case, outcomes in trained:
        values, norms = alone(case)
        begun = net_of(case).state_dict()
        moved = [name for name in values if not torch.equal(values[name], begun[name])]
        assert len(moved) > len(values) / 2
        for outcome in outcomes:
            assert outcome.values.keys() == values.keys()
            for name, value in values.items():
                torch.testing.assert_close(outcome.values[name], value, rtol=0, atol=CLOSE)
            assert outcome.norms == pytest.approx(norms, abs=CLOSE)


def test_what_is_clipped_frozen_and_masked_is_so_indeed(trained: Trained) -> None:
    for case, outcomes in trained:
        values, begun = outcomes[0].values, net_of(case).state_dict()
        if case.clip_norm is not None:
            assert max(outcomes[0].norms) > case.clip_norm
        if case.freezes:
            assert torch.equal(values["blocks.0.second.weight"], begun["blocks.0.second.weight"])
            assert not torch.equal(values["blocks.0.first.weight"], begun["blocks.0.first.weight"])


def test_all_ranks_have_the_same_bits(trained: Trained) -> None:
    for _, (first, *others) in trained:
        for other in others:
            assert all(torch.equal(other.values[name], value) for name, value in first.values.items())
            assert other.norms == first.norms


def test_collectives_and_bytes_are_exactly_the_planned_ones(trained: Trained) -> None:
    assert_planned(trained)


def assert_planned(trained: Trained) -> None:
    for case, outcomes in trained:
        for outcome in outcomes:
            if case.checkpoints == "reentrant" and case.strategy[0] != "N":
                continue  # gathers a unit once more, before its forward runs again
            done = {each: replace(count, elapsed_s=0.0) for each, count in outcome.done.items()}
            assert done == outcome.planned, case
            assert all(count.elapsed_s > 0 for count in outcome.done.values())
        sent = [count for outcome in outcomes for count in outcome.done.values()]
        assert sum(each.intra_bytes + each.inter_bytes for each in sent) > 0


def test_ranks_keep_what_the_formula_says_with_the_padding(trained: Trained) -> None:
    """Parameters and gradients have 8 bytes, plus Adam's two moments, without padding; masters are the parameters."""
    for case, outcomes in trained:
        strategy, ranks = strategy_of(case.strategy), case.grouping.ranks
        expected = 0
        for numel, is_trainable in outcomes[0].flats:
            cut = Cut(numel=numel, grouping=case.grouping)
            expected += 8 * ranks * cut.num_owned(strategy.params)
            if is_trainable:
                expected += 8 * ranks * cut.num_owned(strategy.gradients)
                expected += 16 * ranks * numel // case.grouping.split(strategy.states)
        assert sum(outcome.kept_bytes for outcome in outcomes) == expected, case


@pytest.mark.slow
def test_in_bf16_the_update_is_off_by_two_percent_at_most(tmp_path_factory: pytest.TempPathFactory) -> None:
    halves = train(HALVES, tmp_path_factory)
    assert_planned(halves)
    for case, outcomes in halves:
        values, _ = alone(case)
        begun = net_of(case).state_dict()
        for outcome in outcomes:
            off = sum(float((outcome.values[name] - values[name]).square().sum()) for name in values)
            update = sum(float((values[name] - begun[name]).square().sum()) for name in values)
            assert (off / update) ** 0.5 < 2e-2, case
