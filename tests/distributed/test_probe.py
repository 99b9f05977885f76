"""Measured bandwidths between ranks: the same on every rank, and refused without two groups of two."""

from pathlib import Path

import pytest

from fedsign.errors import ConfigError
from fedsign.sharding.layout import Grouping
from fedsign.sharding.probe import link_of, probe
from fedsign.sharding.traffic import Link, Network
from tests.distributed.ranks import on_ranks


def probed() -> Network:
    return probe(Grouping(groups=2, per_group=2), message_bytes=2**16)


def test_all_ranks_have_measured_the_same(tmp_path: Path) -> None:
    found = on_ranks(4, probed, folder=tmp_path)
    assert len(set(found)) == 1
    assert 0 < found[0].intra_bps < 1e15 and 0 < found[0].inter_bps < 1e15


@pytest.mark.parametrize(("groups", "per_group"), [(1, 4), (4, 1)])
def test_without_a_link_of_both_kinds_nothing_is_measured(groups: int, per_group: int) -> None:
    with pytest.raises(ConfigError, match=r"at least 2 groups of 2 ranks"):
        probe(Grouping(groups=groups, per_group=per_group))


@pytest.mark.parametrize(
    ("one", "every", "per_group", "expected"),
    [
        (100.0, 98.0, 2, Link.RANK),
        (100.0, 50.0, 2, Link.GROUP),
        (100.0, 12.5, 8, Link.GROUP),
        (100.0, 60.0, 8, Link.RANK),
    ],
)
def test_a_shared_link_is_told_by_the_share_of_each(one: float, every: float, per_group: int, expected: Link) -> None:
    assert link_of(one, every, per_group=per_group) is expected
