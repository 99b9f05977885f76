"""Local training on ranks is that of one process, whatever a client trains, in float64; all rows share their ranks.

With weights in bf16 it is, too, to the bit, where nothing but what is rounded by client.low_precision is rounded
(`tests.distributed.low`).  Otherwise ranks round parts of gradients, where one process rounds the whole: each is about
as far from training in float32, so that they are at most twice as far apart.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from clients.sharding.payload import MODEL, to_payload
from clients.sharding.training import lost_metric, mean_loss
from fedsign.capabilities import CAPABILITIES
from fedsign.records import LOST_UPDATES, Tensors
from tests.distributed.parity import ROWS, Answer, Asked, Reply, alone, on_rank
from tests.distributed.ranks import on_ranks

GROUPINGS = {"2x2": {"ranks": 4, "groups": 2}, "2x3": {"ranks": 6, "groups": 2}}
CAN_RUN = [
    name
    for name, row in ROWS.items()
    if (not row.needs or row.needs in CAPABILITIES) and ("lora" not in name or find_spec("peft"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@cache
def in_one_process(folder: Path) -> dict[str, tuple[list[Asked], list[Answer]]]:
    return {name: alone(folder, name) for name in CAN_RUN}


@cache
def in_float32(folder: Path, name: str) -> list[Answer]:
    return alone(folder, name, {"dtype": "float32"})[1]


@cache
def trained(folder: Path, grouping: str) -> list[dict[str, list[Reply]]]:
    """All rows on one group of ranks, which takes longer to start than to train them."""
    asked = {name: requests for name, (requests, _) in in_one_process(folder).items()}
    torch.save(asked, folder / "asked.pt")  # as arguments, tensors take a descriptor each
    sharding = GROUPINGS[grouping]
    return on_ranks(sharding["ranks"], on_rank, folder, sharding, folder=folder / grouping)


@pytest.mark.parametrize("grouping", ["2x2", pytest.param("2x3", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(row.needs) if row.needs else ()) for name, row in ROWS.items()]
)
def test_a_client_on_ranks_trains_as_in_one_process(name: str, grouping: str, folder: Path) -> None:
    if name not in CAN_RUN:
        pytest.skip("peft is not installed")
    row, ranks = ROWS[name], trained(folder, grouping)
    asked, expected = in_one_process(folder)[name]
    close = row.tolerance(len(ranks))
    for index, ((request, _), answer) in enumerate(zip(asked, expected, strict=True)):
        replies, wanted = [rank[name][index] for rank in ranks], answer.tensors
        start = {key: value for key, value in to_payload({MODEL: request.tensors}).items() if key in wanted}
        assert sum(not torch.equal(wanted[key], value) for key, value in start.items()) > row.moved * len(start)
        for reply in replies:
            assert reply.tensors.keys() == wanted.keys()
            assert all(reply.tensors[key].dtype == value.dtype for key, value in wanted.items())
            for key, value in wanted.items() if close is not None else ():
                off = (reply.tensors[key] - value).abs().max()
                assert off <= close * max(float(value.abs().max()), 1.0), (key, float(off))
        loss = mean_loss(replies[0].nums, [reply.losses for reply in replies])
        assert loss == pytest.approx(answer.metrics["train-loss"], rel=close if close == 1e-12 else 1e-2)
        assert lost_metric([reply.lost for reply in replies]) == {
            key: value for key, value in answer.metrics.items() if key == LOST_UPDATES
        }
        if row.in_bf16:
            exact = in_float32(folder, name)[index].tensors
            own = distance(wanted, exact)
            assert 0 < own < 0.1 * distance(exact, start)
            assert all(distance(reply.tensors, wanted) < 2 * own for reply in replies)


def distance(one: Tensors, other: Tensors) -> float:
    return sum(float((one[key] - value).double().square().sum()) for key, value in other.items()) ** 0.5
