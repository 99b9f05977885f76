"""Packing of a sparse model: rows of nonzero weights, and whole tensors again."""

import pytest
import torch
from torch import nn

from clients.partial.model import PartModel
from clients.working_model import WorkingModel
from fedsign.models.transform import packing_of
from fedsign.numerics import Numerics
from fedsign.parameterization.apply import parameterize, parameterized
from fedsign.parameterization.masks import Mask, mask_of
from fedsign.parameterization.packing import RowPacking
from fedsign.parameterization.schemes import Scheme
from fedsign.records import Tensors

CPU = Numerics(device=torch.device("cpu"))


def values(shape: tuple[int, ...], mask: Mask) -> torch.Tensor:
    return torch.arange(1.0, 1 + mask.is_present.numel()).view(shape) * mask.is_present


@pytest.mark.parametrize("shape", [(3, 5), (4, 2, 3, 3)])
@pytest.mark.parametrize("density", [1e-6, 0.3, 1.0])
def test_a_row_holds_what_there_is_in_order_and_becomes_the_tensor_again(
    shape: tuple[int, ...], density: float
) -> None:
    mask = mask_of(1, "w", shape, density)
    packing, tensor = RowPacking({"w": mask}), values(shape, mask)
    row = packing.packed({"w": tensor, "b": tensor})
    assert row["b"] is tensor and row["w"].tolist() == [value for value in tensor.flatten().tolist() if value]
    assert packing.shape("w", tensor.shape) == row["w"].shape == (mask.num,)
    assert torch.equal(packing.whole(row)["w"], tensor) and packing.whole(row)["b"] is tensor


def test_stacks_are_packed_client_by_client_and_types_are_kept() -> None:
    mask = mask_of(1, "w", (3, 5), 0.5)
    packing = RowPacking({"w": mask})
    stack = torch.stack([values((3, 5), mask), -values((3, 5), mask)]).to(torch.bfloat16)
    rows = packing.packed({"w": stack})["w"]
    assert rows.shape == (2, mask.num) and rows.dtype == torch.bfloat16 and torch.equal(rows[0], -rows[1])
    assert torch.equal(packing.whole({"w": rows[1]})["w"], stack[1])


def test_what_has_another_shape_passes_for_others_to_judge() -> None:
    packing = RowPacking({"w": mask_of(1, "w", (3, 5), 0.5)})
    scalar, longer = torch.zeros(()), torch.zeros(99)
    assert packing.packed({"w": scalar})["w"] is scalar and packing.whole({"w": longer})["w"] is longer


def test_channels_last_tensors_are_filled_in_the_order_of_their_shape() -> None:
    mask = mask_of(1, "w", (4, 2, 3, 3), 0.3)
    packing, tensor = RowPacking({"w": mask}), values((4, 2, 3, 3), mask)
    laid_out = torch.full_like(tensor, torch.nan).contiguous(memory_format=torch.channels_last)
    assert not laid_out.is_contiguous()
    packing.put("w", packing.packed({"w": tensor})["w"], laid_out)
    assert torch.equal(laid_out, tensor)  # NaN where no weight is has gone too
    assert torch.equal(packing.packed({"w": laid_out})["w"], packing.packed({"w": tensor})["w"])


class Tied(nn.Module):
    """One hidden matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.two(self.one(self.first(x))))
        return found


def sparse() -> nn.Module:
    torch.manual_seed(0)
    model = Tied()
    parameterize(model, Scheme(density=0.25, init_std=0.1), seed=2)
    return model


@pytest.mark.parametrize("kind", [WorkingModel, PartModel])
def test_a_model_takes_rows_in_and_gives_rows_out(kind: type[WorkingModel]) -> None:
    model = kind(sparse(), CPU)
    given: Tensors = {name: torch.full_like(row, 2.0) for name, row in WorkingModel(sparse(), CPU).copies().items()}
    assert given["one.weight"].shape == packing_of(sparse()).shape("one.weight", torch.Size([8, 8]))
    assert "two.weight" not in given  # tied to the first: sent once
    model.load(given)
    made = parameterized(model.module)
    assert made is not None
    assert torch.equal(model.module.get_parameter("one.weight"), 2.0 * made.masks["one.weight"].is_present)
    for found in (model.copies(), model.tensors()):
        assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)
    received = model.received(given, round=1)
    assert received["one.weight"].shape == (8, 8) and "two.weight" not in received  # parameters, each once
    wrong = {**given, "one.weight": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for one\.weight"):
        model.load(wrong)


def test_what_an_objective_compares_with_is_made_whole_once_a_round_and_when_it_is_asked_for() -> None:
    model = WorkingModel(sparse(), CPU)
    given = model.copies()
    received = model.received(given, round=1)
    assert model.received(dict(given), round=1) is received
    assert received["one.weight"] is received["one.weight"] and received["first.bias"] is given["first.bias"]
