"""Rings of sends and receives: the values of torch's own collectives, and exactly the planned bytes."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fedsign.errors import ConfigError
from fedsign.sharding.collectives import Collectives, own
from fedsign.sharding.layout import Cut, Granularity, Grouping
from fedsign.sharding.strategy import Collective, Operation, Scope
from fedsign.sharding.traffic import Count, Rings, planned
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.slow

GROUPINGS = [(2, 2), (1, 4), (4, 1), (2, 3), (3, 2)]
OPERATIONS = [operation for operation in Operation if operation is not Operation.EXCHANGE]
KINDS = [Collective(scope=scope, operation=operation) for scope, operation in product(Scope, OPERATIONS)]
SIZES = (1, 7, 1001)
DTYPES = (torch.float64, torch.bfloat16)
NONE, GROUP, GLOBAL = Granularity


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(-4, 5, (numel,), generator=generator).to(dtype)


def is_right(collectives: Collectives, kind: Collective, numel: int, dtype: torch.dtype) -> bool:
    """Whether a collective gives the sums or the parts of all ranks, computed here from what all began with."""
    grouping, rank = collectives.grouping, collectives.rank
    between = {
        Scope.INTRA: grouping.group_ranks(rank),
        Scope.INTER: grouping.peer_ranks(rank),
        Scope.ALL: list(range(grouping.ranks)),
    }[kind.scope]
    coarse, fine = {Scope.INTRA: (NONE, GROUP), Scope.INTER: (GROUP, GLOBAL), Scope.ALL: (NONE, GLOBAL)}[kind.scope]
    size = Cut(numel=numel, grouping=grouping).num_owned(coarse)
    begun = {each: values_of(each, size, dtype) for each in between}
    total = torch.stack([each.double() for each in begun.values()]).sum(0).to(dtype)
    tensor = begun[rank].clone()
    if kind.operation is Operation.ALL_GATHER:
        tensor.fill_(torch.nan)
        wanted = torch.empty_like(tensor)
        for each in between:
            part = own(begun[each], of=coarse, to=fine, grouping=grouping, rank=each)
            own(wanted, of=coarse, to=fine, grouping=grouping, rank=each).copy_(part)
            if each == rank:
                own(tensor, of=coarse, to=fine, grouping=grouping, rank=each).copy_(part)
        collectives.run(kind, tensor)
        return torch.equal(tensor, wanted)
    collectives.run(kind, tensor)
    if kind.operation is Operation.ALL_REDUCE:
        return torch.equal(tensor, total)
    mine = own(tensor, of=coarse, to=fine, grouping=grouping, rank=rank)
    return torch.equal(mine, own(total, of=coarse, to=fine, grouping=grouping, rank=rank))


def try_all(groupings: list[tuple[int, int]]) -> dict[Any, tuple[bool, Count]]:
    """Of every collective: whether it is right, and what it sent."""
    found: dict[Any, tuple[bool, Count]] = {}
    for shape, rings, kind in product(groupings, Rings, KINDS):
        for numel, dtype in product(SIZES, DTYPES):
            collectives = Collectives(Grouping(groups=shape[0], per_group=shape[1]), rings=rings)
            right = is_right(collectives, kind, numel, dtype)
            count = collectives.counts[kind]
            found[shape, rings, kind, numel, dtype] = (right, replace(count, elapsed_s=0.0))
    return found


def collectives_of_a_wrong_size() -> str:
    try:
        Collectives(Grouping(groups=3, per_group=2))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module", params=[4, 6])
def tried(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What all ranks found."""
    groupings = [each for each in GROUPINGS if each[0] * each[1] == request.param]
    return on_ranks(request.param, try_all, groupings, folder=tmp_path_factory.mktemp("collectives"))


def test_every_collective_gives_what_all_ranks_began_with_flat_and_in_two_levels(tried: list[dict[Any, Any]]) -> None:
    wrong = [(rank, key) for rank, found in enumerate(tried) for key, (right, _) in found.items() if not right]
    assert not wrong
    assert len(tried[0]) >= 2 * 2 * 9 * len(SIZES) * len(DTYPES)


def test_what_is_sent_is_what_was_planned_to_the_byte(tried: list[dict[Any, Any]]) -> None:
    for rank, found in enumerate(tried):
        for (shape, rings, kind, numel, dtype), (_, sent) in found.items():
            grouping = Grouping(groups=shape[0], per_group=shape[1])
            block_bytes = Cut(numel=numel, grouping=grouping).block * dtype.itemsize
            expected = planned(kind, rank=rank, block_bytes=block_bytes, grouping=grouping, rings=rings)
            assert sent == expected, (rank, shape, rings, str(kind), numel)


def test_groups_that_are_not_all_ranks_are_refused(tmp_path: Any) -> None:
    said = on_ranks(2, collectives_of_a_wrong_size, folder=tmp_path)
    assert all("3 groups of 2 ranks were given in a process group of 2" in each for each in said)


def test_without_a_process_group_the_remedy_is_named() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match=r"call torch.distributed.init_process_group first"):
        Collectives(Grouping(groups=1, per_group=1))
