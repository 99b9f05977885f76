"""Compressed products of sparse layers equal dense ones to rounding, and are chosen by a rule."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clients.trainer import check_training
from clients.working_model import WorkingModel
from fedsign.config import from_dict
from fedsign.errors import ConfigError
from fedsign.models.gpt import gpt
from fedsign.models.transform import prepare_training
from fedsign.numerics import Numerics
from fedsign.parameterization.apply import parameterize, parameterized
from fedsign.parameterization.masks import Mask, mask_of
from fedsign.parameterization.products import (
    LEAST_PRODUCTS,
    MOST_DENSITY,
    Products,
    SparseForward,
    pays,
)
from fedsign.parameterization.schemes import SmuPar
from fedsign.records import ObjectiveSpec
from fedsign.workload import Workload
from simulations.api import run

CPU = Numerics(device=torch.device("cpu"))


def passed(layer: Any, module: nn.Linear, x: Tensor) -> dict[str, Tensor]:
    """Outputs, and the gradients of a fixed function of them."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = layer(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    found = {"y": y.detach(), "x": x.grad, "weight": module.weight.grad}
    return {key: value for key, value in found.items() if value is not None} | (
        {} if module.bias is None else {"bias": module.bias.grad}  # type: ignore[dict-item]
    )


def layer(num_in: int, num_out: int, mask: Mask, *, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(num_in, num_out, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.mul_(mask.is_present)
    made.weight.register_hook(mask)
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 33), (33,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.2, 1.0])
def test_outputs_and_gradients_are_those_of_the_whole_product(
    shape: tuple[int, ...], bias: bool, density: float, dtype: torch.dtype, tolerance: float
) -> None:
    """With 0 no weight is there, with 0.01 most rows and columns are empty."""
    mask = mask_of(0, "w", (21, 33), density) if density < 1 else Mask(torch.ones(21, 33, dtype=torch.bool))
    module = layer(33, 21, mask, bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    whole, sparse = passed(module, module, x), passed(SparseForward(module, mask, always=True), module, x)
    assert sparse.keys() == whole.keys() and len(whole) == 3 + bias
    for key, value in whole.items():
        assert sparse[key].shape == value.shape and sparse[key].is_contiguous()
        assert (sparse[key] - value).norm() <= tolerance * value.norm(), key
    assert not sparse["weight"][~mask.is_present].any()
    again = passed(SparseForward(module, mask, always=True), module, x)
    assert all(torch.equal(value, again[key]) for key, value in sparse.items())


def test_both_orders_of_a_masks_weights_are_the_matrix() -> None:
    mask = mask_of(0, "w", (9, 14), 0.3)
    values = torch.arange(1.0, mask.num + 1)
    whole = torch.zeros(9, 14)
    whole[mask.is_present] = values
    columns = mask.columns
    assert torch.equal(columns.rows(values).to_dense(), whole)
    assert torch.equal(columns.turned_rows(values).to_dense(), whole.t())
    taken = sum(each.nbytes for each in (columns.columns, columns.turned, columns.turned_columns))
    assert taken == 12 * mask.num and columns.indices is mask.indices


def test_the_rule_is_for_large_products_with_few_weights() -> None:
    side = 128
    rows = LEAST_PRODUCTS // side**2
    few, more = mask_of(0, "w", (side, side), 1 / 16), mask_of(0, "w", (side, side), 1 / 8)
    assert few.num <= MOST_DENSITY * side**2 < more.num
    assert pays(few, rows) and not pays(few, rows - 1) and not pays(more, rows)
    few.become(more.is_present)
    assert not pays(few, rows)


def model(products: Any = "csr", density: float = 1 / 16, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    made = gpt((12,), 40, depth=1, width=256, num_heads=8)
    scheme, kind = SmuPar(base_width=64, density=density), Products(kind=products, **settings)
    parameterize(made, scheme, seed=0, products=kind)
    return made


def num_sparse(made: nn.Module) -> int:
    return sum(isinstance(vars(module).get("forward"), SparseForward) for module in made.modules())


def test_a_working_model_multiplies_its_masked_linear_layers_so() -> None:
    assert num_sparse(WorkingModel(model("auto"), CPU).module) == 6
    assert num_sparse(WorkingModel(model("dense"), CPU).module) == 0
    assert num_sparse(WorkingModel(model("csr", density=1.0), CPU).module) == 0
    for other, device in (({"precision": "bf16"}, "cpu"), ({"compile": True}, "cpu"), ({}, "meta")):
        made = model("auto", **other).to(device)
        prepare_training(made)
        assert num_sparse(made) == 0
        with pytest.raises(
            ConfigError, match=r"sparse_products=csr was given with engine\.(device|precision|compile)="
        ):
            prepare_training(model("csr", **other).to(device))


def test_other_weights_and_gradients_of_absent_ones_come_of_whole_products() -> None:
    """torch.func gives a layer tensors in place of its parameter; RigL asks for dense gradients."""
    made = model()
    prepare_training(made)
    module, found = made.get_submodule("blocks.0.ffn.up"), parameterized(made)
    assert found is not None
    mask, x = found.masks["blocks.0.ffn.up.weight"], torch.randn(3, 256)
    other = torch.randn(1024, 256)
    given = torch.func.functional_call(module, {"weight": other, "bias": torch.zeros(1024)}, (x,))
    torch.testing.assert_close(given, x @ other.t())
    with torch.no_grad():
        whole = module.weight.clone().fill_(0.5)  # a server evaluates weights whose mask a client has changed
        module.weight.copy_(whole)
    torch.testing.assert_close(module.eval()(x), x @ whole.t())
    module.train()
    mask.keep_gradient(True)
    module(x).square().sum().backward()
    assert mask.dense_gradient is not None and mask.dense_gradient[~mask.is_present].abs().min() > 0


SMALL: dict[str, Any] = {
    "rounds": 2,
    "callbacks": [],
    "partition": {"num_clients": 3, "alpha": 1.0},
    "server": {"cohort_size": 2},
    "model": {"name": "mlp", "hidden": [64, 64]},
    "client": {"local_steps": 5, "lr": 0.01, "clip_norm": 1.0, "optimizer": {"name": "packed_adamw"}},
    "parameterization": {"name": "smupar", "density": 1 / 16, "base_width": 64, "init_std": 0.1},
}


def test_a_federation_gives_the_same_with_compressed_rows_to_rounding(tmp_path: Any) -> None:
    losses, models = {}, {}
    for products in ("dense", "csr"):
        changes = {"engine": {"sparse_products": products}, "results": {"root": str(tmp_path / products)}}
        done = run({**SMALL, **changes})
        losses[products], models[products] = [line["loss"] for line in done.rounds], done.model().state_dict()
    assert losses["csr"] == pytest.approx(losses["dense"], rel=1e-5)
    for name, tensor in models["dense"].items():
        assert (models["csr"][name] - tensor).norm() <= 1e-4 * tensor.norm()
    absent = models["dense"]["2.weight"] == 0
    assert absent.float().mean() > 0.9 and torch.equal(models["csr"]["2.weight"] == 0, absent)


def test_masks_that_change_are_followed(tmp_path: Any) -> None:
    alone = {"rounds": 1, "partition": {"name": "iid", "num_clients": 1}, "server": {"cohort_size": 1}}
    for rule in ("rigl", "gmp"):
        losses = []
        for products in ("dense", "csr"):
            changes = {"sparsity": {"name": rule, "every": 2, "last_step": 5}, "engine": {"sparse_products": products}}
            done = run({**SMALL, **alone, **changes, "results": {"root": str(tmp_path / products)}})
            losses.append(done.rounds[-1]["loss"])
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.needs("cohort")
def test_stacks_have_whole_products_and_say_so() -> None:
    stacked = {**SMALL["client"], "path": "cohort", "optimizer": {"name": "adamw"}}
    asked = {"engine": {"sparse_products": "csr"}, "client": stacked}
    with pytest.raises(ConfigError, match=r"sparse_products=csr is for one client after another only"):
        check_training(Workload(from_dict({**SMALL, **asked})), ObjectiveSpec())


@pytest.mark.needs("sharding")
def test_ranks_have_whole_products_and_say_so() -> None:
    for changes, said in (
        ({"engine": {"sparse_products": "csr"}}, "use auto or dense"),
        ({"sparsity": {"name": "rigl", "last_step": 200}}, r"use sparsity\.name=static"),
    ):
        several = {**SMALL, "client": {**SMALL["client"], "sharding": {"ranks": 2}}, **changes}
        with pytest.raises(ConfigError, match=said):
            check_training(Workload(from_dict(several)), ObjectiveSpec())


def test_compressed_rows_that_cannot_be_had_are_refused_before_the_run() -> None:
    workload = Workload(from_dict({**SMALL, "engine": {"sparse_products": "csr", "precision": "bf16"}}))
    with pytest.raises(ConfigError, match=r"use engine\.sparse_products=auto"):
        check_training(workload, ObjectiveSpec())
