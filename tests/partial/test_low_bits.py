"""8-bit moments and a 4-bit base, against bitsandbytes' own optimizers, quantization, and layers."""

import copy
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from clients.trainer import check_training
from fedsign import run
from fedsign.config import from_dict, merged
from fedsign.errors import ConfigError
from fedsign.models.transform import plain_model
from fedsign.optim.adamw_8bit import adamw_8bit, num_scales
from fedsign.optim.bnb import quiet
from fedsign.optim.lora import adapt
from fedsign.optim.nf4 import NF4Linear, nf4_bytes
from fedsign.records import ObjectiveSpec
from fedsign.seeding import Purpose, global_stream
from fedsign.workload import Workload

quiet()
bitsandbytes: Any = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": "all_linear", "head": False, "quantization": "nf4"}
BASE: dict[str, Any] = {
    "rounds": 2,
    "callbacks": [],
    "model": {"name": "mlp", "hidden": [96, 96]},
    "partition": {"name": "iid", "num_clients": 4},
    "server": {"cohort_size": 2},
    "strategy": {"name": "fedavg"},
    "client": {"local_steps": 5, "lr": 1e-2, "optimizer": {"name": "lora", "rank": 4, "quantization": "nf4"}},
}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with global_stream(0, Purpose.MODEL):
        return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 80, bias=False), nn.Linear(80, 3)).to(dtype)


def adapted(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Sequential:
    model = network(dtype)
    with global_stream(0, Purpose.ADAPTERS):
        adapt(model, {**LORA, **changes})
    return model


def inputs(num: int = 5) -> Tensor:
    return torch.randn(num, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("min_8bit_size", [0, 4096])
def test_steps_are_those_of_bitsandbytes(min_8bit_size: int) -> None:
    ours, theirs = network(), network()
    settings = {"betas": (0.8, 0.99), "eps": 1e-6, "min_8bit_size": min_8bit_size}
    reference = bitsandbytes.optim.AdamW8bit(theirs.parameters(), lr=1e-3, weight_decay=0.1, **settings)
    optimizer = adamw_8bit(ours.parameters(), 1e-3, 0.1, beta1=0.8, beta2=0.99, eps=1e-6, min_8bit_size=min_8bit_size)
    for step in range(3):
        for model, each in ((ours, optimizer), (theirs, reference)):
            model.zero_grad()
            functional.cross_entropy(model(inputs() + step), torch.tensor([0, 1, 2, 0, 1])).backward()
            each.step()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name
        held = {key: value for key, value in optimizer.state[parameter].items() if key in ("state1", "absmax1")}
        scales = num_scales(parameter.numel(), min_8bit_size=min_8bit_size)
        assert held["state1"].dtype == (torch.uint8 if scales else torch.float32)
        assert scales == (len(held["absmax1"]) if "absmax1" in held else 0)


def test_a_run_with_8_bit_moments_is_close_to_one_with_float32_moments(tmp_path: Path) -> None:
    """Also in bf16, whose masters are stepped one parameter after another."""
    low = {"name": "tests.training.low_models:network"}
    updates = []
    for name, model in (("adamw", BASE["model"]), ("adamw_8bit", BASE["model"]), ("adamw", low), ("adamw_8bit", low)):
        settings = {"min_8bit_size": 0} if name == "adamw_8bit" else {}
        client = {"lr": 1e-3, "local_steps": 5, "optimizer": {"name": name, **settings}}
        done = run({**BASE, "model": model, "client": client, "results": {"root": str(tmp_path)}})
        start = Workload(done.config).make_model().state_dict()
        end = done.model().state_dict()
        updates.append(torch.cat([(end[key].double() - start[key].double()).flatten() for key in start]))
    for exact, found in (updates[:2], updates[2:]):
        assert 0 < (found - exact).norm() < 0.2 * exact.norm()


def test_channels_last_weights_are_refused() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match=r"set engine\.channels_last=off"):
        adamw_8bit(model.parameters(), 1e-3, 0.0)


@pytest.mark.parametrize(
    ("model", "layout", "is_refused"), [("cnn", "auto", True), ("cnn", "off", False), ("mlp", "on", False)]
)
def test_channels_last_weights_are_refused_before_a_run(model: str, layout: str, is_refused: bool) -> None:
    changes = {
        "model": {"name": model},
        "client": {"optimizer": {"name": "adamw_8bit"}},
        "engine": {"channels_last": layout},
    }
    work = Workload(from_dict({"callbacks": [], "data": {"name": "digits"}, **changes}))
    with pytest.raises(ConfigError, match=r"set engine\.channels_last=off") if is_refused else nullcontext():
        check_training(work, ObjectiveSpec())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_is_bitsandbytes_linear4bit(dtype: torch.dtype) -> None:
    """Outputs and gradients of its own layer, quantized from the same weights, and B = 0 in the adapters."""
    model, plain = adapted(dtype), network(dtype)
    for index in (0, 2):
        given: Any = plain[index]
        own = bitsandbytes.nn.Linear4bit(
            given.in_features,
            given.out_features,
            bias=given.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
        )
        own.load_state_dict(given.state_dict())
        plain[index] = own.to("cpu")
        layer = model[index].base_layer
        assert isinstance(layer, NF4Linear) and torch.equal(layer.packed, own.weight.data)
        assert layer.num_bytes == nf4_bytes(given.in_features * given.out_features)
    features = inputs().to(dtype).requires_grad_()
    theirs = features.detach().clone().requires_grad_()
    outputs, expected = model(features), plain(theirs)
    assert torch.equal(outputs, expected)
    outputs.sum().backward()
    expected.sum().backward()
    assert features.grad is not None and theirs.grad is not None
    torch.testing.assert_close(features.grad, theirs.grad)
    assert model[0].lora_B.default.weight.grad.abs().sum() > 0


def test_what_is_merged_is_the_dequantized_base() -> None:
    model = adapted()
    nn.init.normal_(model[0].lora_B.default.weight)
    expected = model(inputs())
    merged_model = plain_model(copy.deepcopy(model))
    assert type(merged_model[0]) is type(merged_model[2]) is nn.Linear and merged_model[2].bias is None
    torch.testing.assert_close(merged_model(inputs()), expected, rtol=1e-4, atol=1e-5)
    loaded = network()
    loaded.load_state_dict(merged_model.state_dict())  # a plain model's names
    given = network()[2].weight.detach()  # B is 0 there
    library = bitsandbytes.functional
    quantized = library.quantize_4bit(given, quant_type="nf4", compress_statistics=True)
    assert torch.equal(merged_model[2].weight, library.dequantize_4bit(*quantized))
    assert 0 < (merged_model[2].weight - given).norm() < 0.1 * given.norm()
    assert torch.equal(pickle.loads(pickle.dumps(model))(inputs()), expected)


def test_transposed_layers_are_quantized_and_restored() -> None:
    transformers = pytest.importorskip("transformers.pytorch_utils", reason="transformers is not installed")
    model = nn.Sequential(transformers.Conv1D(96, 64), nn.Linear(96, 3))
    adapt(model, {**LORA, "targets": "0"})
    expected = model(inputs())
    restored = plain_model(model)
    assert type(restored[0]) is transformers.Conv1D and restored[0].weight.shape == (64, 96)
    torch.testing.assert_close(restored(inputs()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("low_precision", ["", "master", "stochastic"])
def test_a_run_sends_adapters_only_learns_and_repeats(low_precision: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"results": {"root": str(tmp_path)}}
    if low_precision:
        changes["client"] = {"low_precision": low_precision}
        changes["model"] = {"name": "tests.training.low_models:network", "hidden": [96, 96]}
    first, again = (run(merged(BASE, changes)) for _ in range(2))
    assert (first.path / "rounds.jsonl").read_bytes() == (again.path / "rounds.jsonl").read_bytes()
    outside = {name for name in Workload(first.config).roles if ".lora_" not in name}
    assert not outside
    start = Workload(first.config).evaluate(Workload(first.config).make_model())
    assert first.rounds[-1]["loss"] < start["loss"]


def test_models_of_a_process_share_the_base() -> None:
    workload = Workload(from_dict(BASE))
    first, second = workload.make_model(), workload.make_model()
    bases = [
        [each.packed.data_ptr() for each in model.modules() if isinstance(each, NF4Linear)] for model in (first, second)
    ]
    assert bases[0] and bases[0] == bases[1]


@pytest.mark.parametrize("aggregation", ["flora", "fedex"])
def test_a_base_that_the_server_changes_is_not_quantized(aggregation: str) -> None:
    with pytest.raises(ConfigError, match=f"aggregation={aggregation}, but the base is changed by the server; use"):
        adapted(aggregation=aggregation)


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    remedy = r"needs the package 'bitsandbytes', which is not installed here: pip install 'fedsign\[bitsandbytes\]'"
    with pytest.raises(ConfigError, match=rf"client\.optimizer\.name=adamw_8bit {remedy}"):
        adamw_8bit(network().parameters(), 1e-3, 0.0)
    with pytest.raises(ConfigError, match=rf"client\.optimizer\.quantization=nf4 {remedy}"):
        NF4Linear(nn.Linear(2, 2), is_transposed=False)
