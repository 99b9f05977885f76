"""Dropout with masks from 64-bit words: distribution, random stream, layouts, and what is left to torch."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from clients.working_model import WorkingModel
from fedsign.models.channels_last import laid_out
from fedsign.models.dropout import Dropout, mask
from fedsign.numerics import Numerics
from fedsign.seeding import Purpose, global_stream, torch_generator

NUM = 2**20


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.75, 0.9, 1e-9, 1 - 1e-9])
def test_a_mask_keeps_so_many_and_its_mean_is_one(keep: float) -> None:
    """Of independent draws with probability k / 65536, next to `keep`; what stays is 65536 / k."""
    share = min(max(round(keep * 65536), 1), 65535) / 65536
    assert abs(share - keep) < 2e-5
    drawn = mask((NUM,), keep, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert set(drawn.unique().tolist()) <= {0.0, 1 / share}
    kept = int((drawn > 0).sum())
    assert stats.binomtest(kept, NUM, share).pvalue > 1e-4


def test_neighbors_in_a_mask_are_independent_also_within_a_word() -> None:
    drawn = mask((NUM,), 0.5, dtype=torch.float32, generator=torch.Generator().manual_seed(2)).numpy() > 0
    words = drawn.reshape(-1, 4) @ np.array([1, 2, 4, 8])
    assert stats.chisquare(np.bincount(words, minlength=16)).pvalue > 1e-4, "all 16 patterns of a word are alike"
    pairs = 2 * drawn[3:-1:4] + drawn[4::4]
    assert stats.chisquare(np.bincount(pairs, minlength=4)).pvalue > 1e-4, "nor does a word know of the next"


@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 4, 5)])
def test_a_generator_gives_what_torchs_own_gives_in_the_same_state(shape: tuple[int, ...]) -> None:
    where = {"round": 3, "partition": 4}
    own = mask(shape, 0.7, dtype=torch.float32, generator=torch_generator(0, Purpose.TRAINING, **where))
    with global_stream(0, Purpose.TRAINING, **where):
        assert torch.equal(mask(shape, 0.7, dtype=torch.float32), own)
    assert own.shape == shape


@pytest.mark.parametrize("inplace", [False, True])
def test_the_layer_multiplies_values_and_gradients_with_its_mask_in_any_layout(inplace: bool) -> None:
    layer, drawn = Dropout(0.25, inplace=inplace), []
    for layout in (lambda x: x, laid_out):
        x = layout(torch.ones(3, 4, 6, 6)).requires_grad_()
        with global_stream(0, Purpose.TRAINING):
            y = layer(x * 2)
        assert y.stride() == x.stride()
        y.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, y.detach())
        drawn.append(y.detach())
    assert torch.equal(drawn[0], drawn[1])
    assert drawn[0].unique().tolist() == pytest.approx([0.0, 2 / 0.75])


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_rates_that_leave_nothing_to_chance_are_torchs(rate: float) -> None:
    x, before = torch.ones(8), torch.random.get_rng_state()
    assert torch.equal(Dropout(rate)(x), nn.functional.dropout(x, rate))
    assert torch.equal(Dropout(0.5).eval()(x), x)
    if rate == 0:
        assert torch.equal(torch.random.get_rng_state(), before)


class Own(nn.Dropout):
    """A user's."""


def test_a_working_model_has_it_in_place_of_torchs_and_leaves_a_users_alone() -> None:
    model = nn.Sequential(nn.Dropout(0.5), Own(0.5), nn.Dropout2d(0.5))
    WorkingModel(model, Numerics(device=torch.device("cpu")))
    assert [type(layer) for layer in model] == [Dropout, Own, nn.Dropout2d]
    compiled = nn.Sequential(nn.Dropout(0.5))
    WorkingModel(compiled, Numerics(device=torch.device("cpu"), compile=True))
    assert type(compiled[0]) is nn.Dropout, "the compiler knows torch's"
