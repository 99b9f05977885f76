"""Before round 1: what can be trained starts, and what cannot is one sentence."""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.errors import ConfigError
from fedsign.records import tensors_of
from fedsign.workload import Workload
from simulations import run
from simulations.api import check

HERE = "tests.training.test_rehearsal"
ENTROPY = random.SystemRandom()


class Net(nn.Module):
    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(num_features, num_outputs)
        self.generator = torch.Generator()

    def forward(self, features: Tensor) -> Any:
        return self.head(features.flatten(1))


class Tupled(Net):
    def forward(self, features: Tensor) -> Any:
        return features, super().forward(features)


class Dicted(Net):
    def forward(self, features: Tensor) -> Any:
        return {"logits": super().forward(features), "hidden": features}


class InTraining(Net):
    """Auxiliary outputs while it trains, as torchvision's Inception gives them."""

    def forward(self, features: Tensor) -> Any:
        logits = super().forward(features)
        return (logits, logits) if self.training else logits


class Labels(Net):
    def forward(self, features: Tensor) -> Any:
        return super().forward(features).argmax(dim=1, keepdim=True).expand(-1, 10)


class Detached(Net):
    def forward(self, features: Tensor) -> Any:
        return super().forward(features).detach()


class Pooled(Net):
    def forward(self, features: Tensor) -> Any:
        return super().forward(features).mean(dim=0)


class Broken(Net):
    def forward(self, features: Tensor) -> Any:
        return self.head(features.flatten(1)[:, 1:])


class ExtraDict(Net):
    def get_extra_state(self) -> Any:
        return {"seen": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class ExtraTensor(Net):
    seen = 2.0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = float(state)


class OfTheClass(Net):
    calls = 0

    def forward(self, features: Tensor) -> Any:
        type(self).calls += 1
        return super().forward(features * OfTheClass.calls)


class Harmless(Net):
    calls = 0

    def forward(self, features: Tensor) -> Any:
        type(self).calls += 1
        return super().forward(features)


MEMORY: list[Tensor] = []


class InAGlobal(Net):
    def forward(self, features: Tensor) -> Any:
        shift = MEMORY[-1] if MEMORY else features.new_zeros(())
        MEMORY[:] = [features.detach().mean()]
        return super().forward(features + shift)


class OneLogit(Net):
    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__(num_features, 1)


class TooMany(Net):
    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__(num_features, num_outputs + 1)


class Double(Net):
    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__(num_features, num_outputs)
        self.double()


class Half(Net):
    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__(num_features, num_outputs)
        self.half()


def make(input_shape: tuple[int, ...], num_outputs: int, *, kind: str) -> nn.Module:
    own = globals()[kind](math.prod(input_shape), num_outputs)
    return nn.Sequential(nn.Identity(), own) if kind in ("OfTheClass", "InAGlobal") else own


def lazy(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(num_outputs))


class Unequal:
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)


class PerSample:
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")


class Dropping:
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.fft.fft(outputs).to(torch.float32).square().mean()


class Failing:
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("mine")


def as_dict(outputs: Tensor, targets: Tensor) -> Any:
    return {"accuracy": 1.0}


def as_tensor(outputs: Tensor, targets: Tensor) -> Any:
    return outputs.mean(dim=0)


def failing_metric(outputs: Tensor, targets: Tensor) -> float:
    raise ValueError("mine")


def all_classes(outputs: Tensor, targets: Tensor) -> float:
    """As an AUC, which needs more than a few samples."""
    if len(targets) < 300:
        raise ValueError("too few")
    return 1.0


def numbers(seed: int) -> Dataset:
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(64, 4, generator=rng)
    parts = [Samples(features=each, targets=each.sum(dim=1)) for each in (features, features[:16])]
    return Dataset(train=parts[0], test=parts[1], class_names=())


class Fetched(torch.utils.data.Dataset[tuple[Tensor, int]]):
    targets = [0, 1] * 32

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), ENTROPY.random()), self.targets[index]


def unseeded(seed: int) -> tuple[Fetched, Fetched]:
    return Fetched(), Fetched()


def experiment(kind: str = "Net", **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "callbacks": [],
        "model": {"name": f"{HERE}:make", "kind": kind},
        "partition": {"num_clients": 4, "name": "iid"},
        "client": {"local_steps": 2},
        "server": {"cohort_size": 2},
        **changes,
    }


REGRESSION = {"data": {"name": f"{HERE}:numbers"}, "task": "regression", "metrics": []}
REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "tuple": (experiment("Tupled"), r"gives a tuple with 0, 1; .* use model\.output=0 or model\.output=1"),
    "dict": (experiment("Dicted"), r"gives a dict with logits, hidden; .* use model\.output=logits or"),
    "tuple in training": (experiment("InTraining"), "gives a tuple with 0, 1"),
    "labels": (experiment("Labels"), r"outputs of int64 .* expected floating-point numbers of shape \[4, 10\]"),
    "one logit": (experiment("OneLogit"), r"shape \[4, 1\] for 4 samples with class labels; .* \[4, 10\]"),
    "one too many": (experiment("TooMany"), r"shape \[4, 11\] .* end with 10 outputs per sample"),
    "pooled": (experiment("Pooled", task=f"{HERE}:PerSample", metrics=[]), "whose first dimension is 4"),
    "two numbers": (experiment("TooMany", **REGRESSION), r"shape \[4, 2\] .* with real targets; .* \[4, 1\]"),
    "detached": (experiment("Detached"), "a loss that depends on no parameter"),
    "broken model": (experiment("Broken"), r"model '.*:make': RuntimeError: .*test_rehearsal\.py:\d+\)"),
    "broken task": (experiment(task=f"{HERE}:Failing", metrics=[]), r"task '.*': KeyError.*test_rehearsal\.py:\d+\)"),
    "loss per sample": (experiment(task=f"{HERE}:PerSample", metrics=[]), r"tensor of shape \[4\] as the loss"),
    "broadcast": (
        experiment(**REGRESSION | {"task": f"{HERE}:Unequal"}),
        r"task '.*Unequal': outputs and targets of different shapes .*test_rehearsal\.py:\d+",
    ),
    "imaginary": (experiment(task=f"{HERE}:Dropping", metrics=[]), r"task '.*Dropping': imaginary parts are dropped"),
    "metric: dict": (experiment(metrics=[f"{HERE}:as_dict"]), "metric 'as_dict' gives a dict; expected one number"),
    "metric: tensor": (experiment(metrics=[f"{HERE}:as_tensor"]), r"gives a Tensor of shape \[10\]; expected one"),
    "metric raises": (experiment(metrics=[f"{HERE}:failing_metric"]), r"metric 'failing_metric': ValueError: mine \("),
    "extra state": (experiment("ExtraDict"), "`get_extra_state` gives a dict as '_extra_state'"),
    "class attribute": (experiment("OfTheClass"), r"one client see another: module '1' \(OfTheClass\)"),
    "global": (experiment("InAGlobal"), r"one client see another: module '1' \(InAGlobal\)"),
    "entropy": (experiment(data={"name": f"{HERE}:unseeded"}), "gives a client other samples whenever it trains"),
    "no such part": (
        experiment(model={"name": f"{HERE}:make", "kind": "Dicted", "output": "0"}),
        r"model\.output=0 was given, but .* a dict with logits, hidden; use model\.output=logits",
    ),
    "a part of a tensor": (
        experiment(model={"name": f"{HERE}:make", "kind": "Net", "output": "0"}),
        r"outputs of float32 .*; leave model\.output out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_one_sentence_before_the_run_has_a_folder(case: str, tmp_path: Path) -> None:
    given, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        run({**given, "results": {"root": str(tmp_path / "runs")}})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("case", ["class attribute", "global", "entropy"])
def test_a_large_model_sees_another_client_in_its_passes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.rehearsal.LARGE_BYTES", 0)
    given, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        check(from_dict(dict(given)))
    check(from_dict(experiment("Harmless")))


def test_a_metric_that_a_few_samples_do_not_serve_is_tried_on_all() -> None:
    check(from_dict(experiment(metrics=[f"{HERE}:all_classes"])))


def test_caches_that_change_no_bits_are_not_refused() -> None:
    check(from_dict(experiment("Harmless")))
    assert Harmless.calls


def test_a_rehearsal_leaves_no_trace(tmp_path: Path) -> None:
    """The trained numbers are those of a run whose rehearsal is left out."""
    import simulations.api

    records = []
    for rehearse in (simulations.api.rehearse, lambda workload: []):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simulations.api, "rehearse", rehearse)
            root = {"results": {"root": str(tmp_path)}}
            records.append(run(experiment(**root, data={"augment": "none"})).rounds)
    assert records[0] == records[1]


def rounds(root: Path, **changes: Any) -> list[Mapping[str, Any]]:
    return run(experiment(**{"results": {"root": str(root)}} | changes)).rounds


@pytest.mark.parametrize("path", [pytest.param("cohort", marks=pytest.mark.needs("cohort")), "sequential"])
@pytest.mark.parametrize(("kind", "output"), [("Tupled", "1"), ("Dicted", "logits"), ("Net", "")])
def test_a_named_part_trains_as_the_part_alone(kind: str, output: str, path: str, tmp_path: Path) -> None:
    client = {"local_steps": 2, "path": path}
    expected = rounds(tmp_path, client=client)
    model = {"name": f"{HERE}:make", "kind": kind, "output": output}
    assert rounds(tmp_path, client=client, model=model) == expected


@pytest.mark.parametrize("kind", ["Double", "Half"])
@pytest.mark.parametrize("data", [{}, REGRESSION], ids=["classes", "numbers"])
def test_a_model_of_any_precision_learns_what_a_float32_model_learns(
    kind: str, data: Mapping[str, Any], tmp_path: Path
) -> None:
    """Weights differ by rounding: 2^-11 relative in float16, times a few steps."""
    expected, found = (rounds(tmp_path, model={"name": f"{HERE}:make", "kind": each}, **data) for each in ("Net", kind))
    assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-6 if kind == "Double" else 1e-2)


def test_lazy_layers_are_those_of_a_model_that_names_its_shapes(tmp_path: Path) -> None:
    workload = Workload(from_dict(experiment(model={"name": f"{HERE}:lazy"})))
    first, again = (workload.make_model() for _ in range(2))
    assert [tuple(tensor.shape) for tensor in first.parameters()] == [(8, 64), (8,), (8,), (8,), (10, 8), (10,)]
    assert all(map(torch.equal, tensors_of(first).values(), tensors_of(again).values()))
    assert first.training
    assert isinstance(first[2], nn.BatchNorm1d)  # type: ignore[index]
    assert not first[2].running_mean.any()  # type: ignore[index, union-attr]
    assert len(rounds(tmp_path, model={"name": f"{HERE}:lazy"})) == 2


def test_extra_state_in_a_tensor_is_carried(tmp_path: Path) -> None:
    done = run(experiment("ExtraTensor", results={"root": str(tmp_path)}))
    assert float(done.model().state_dict()["_extra_state"]) == 2.0


COHORT = pytest.param({"client": {"local_steps": 2, "path": "cohort"}}, marks=pytest.mark.needs("cohort"))
WORKERS = pytest.param({"engine": {"workers": 2}}, marks=[pytest.mark.slow, pytest.mark.needs("workers")])
RANKS = pytest.param(
    {"client": {"local_steps": 2, "sharding": {"ranks": 2}}}, marks=[pytest.mark.slow, pytest.mark.needs("sharding")]
)


@pytest.mark.parametrize("changes", [COHORT, WORKERS, RANKS], ids=str)
@pytest.mark.parametrize("kind", ["lazy", "Double", "Tupled", "ExtraTensor"])
def test_every_path_trains_what_one_client_after_another_trains(
    kind: str, changes: Mapping[str, Any], tmp_path: Path
) -> None:
    """A stack refuses extra state, which it would hold for each client."""
    model = {"name": f"{HERE}:make", "kind": kind, "output": "1" if kind == "Tupled" else ""}
    if kind == "lazy":
        model = {"name": f"{HERE}:lazy"}
    expected = rounds(tmp_path, model=model)
    assert np.isfinite(expected[-1]["loss"])
    if kind == "ExtraTensor" and "path" in str(changes):
        with pytest.raises(ConfigError, match="has extra state, or tensors that two layers share"):
            rounds(tmp_path, model=model, **changes)
        return
    found = rounds(tmp_path, model=model, **changes)
    if "engine" in changes:
        assert found == expected
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-6)
