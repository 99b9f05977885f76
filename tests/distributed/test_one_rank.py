"""What one rank shows of the engine, in this process."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from clients.sharding.optim import forget
from fedsign.sharding.flat import Piece
from fedsign.sharding.layout import Grouping
from fedsign.sharding.paro import Sharded


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("clip_norm", "share"), [(50.0, 1.0), (5.0, 1.0), (2.5, 0.5)])
def test_a_gradient_is_scaled_down_to_the_norm_and_never_up(clip_norm: float, share: float) -> None:
    """The gradient of 3 w_0 + 4 w_1 has the norm 5."""
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    grouping = Grouping.of(ranks=1, per_group=1)
    sharded = Sharded(model, lambda named: torch.optim.SGD(named, lr=1.0), grouping=grouping, strategy="NNN")
    gradient = torch.tensor([[3.0, 4.0]])
    sharded(gradient).sum().backward()
    assert sharded.step(clip_norm=clip_norm) == pytest.approx(5.0)
    torch.testing.assert_close(sharded.full_state_dict()["weight"], before - share * gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("alone")
def test_one_rank_starts_no_threads() -> None:
    before, grouping = {*threading.enumerate()}, Grouping.of(ranks=1, per_group=1)
    sharded = Sharded(nn.Linear(2, 1), lambda named: torch.optim.SGD(named), grouping=grouping, strategy="NNN")
    assert {*threading.enumerate()} <= before and sharded.collectives.trail.running is None


def test_moments_of_pieces_that_do_not_train_any_more_are_forgotten_and_the_others_kept() -> None:
    pieces = [Piece(name=name, start=0, numel=2, tensor=nn.Parameter(torch.ones(2))) for name in ("first", "last")]
    optimizer = torch.optim.Adam([piece.tensor for piece in pieces])
    optimizer.state.update({piece.tensor: {"exp_avg": torch.ones(2)} for piece in pieces})
    forget(optimizer, pieces, but={"last"})
    assert set(optimizer.state) == {pieces[1].tensor}
