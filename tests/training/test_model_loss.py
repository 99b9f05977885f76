"""client.loss=model: clients minimize the loss that the model computes itself, and no path leaves it out."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsign.config import from_dict
from fedsign.errors import ConfigError
from simulations import run
from simulations.api import check

HERE = "tests.training.test_model_loss"
SMOOTHING = 0.3


class Net(nn.Module):
    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(num_features, 8), nn.Linear(8, num_outputs)

    def forward(self, features: Tensor) -> Any:
        return self.head(self.body(features.flatten(1)).relu())


class Smoothed(Net):
    """With labels, a loss of its own, as models of `transformers` give it."""

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        outputs = {"logits": super().forward(features)}
        if labels is not None:
            outputs["loss"] = functional.cross_entropy(outputs["logits"], labels, label_smoothing=SMOOTHING)
        return outputs


class OnlyLogits(Net):
    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(features)


class PerSample(Net):
    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(features)
        return logits if labels is None else {"loss": functional.cross_entropy(logits, labels, reduction="none")}


class NotANumber(PerSample):
    def forward(self, features: Tensor, labels: Tensor | None = None) -> Any:
        outputs = super().forward(features, labels)
        return outputs if labels is None else {"loss": outputs["loss"].mean() * math.nan}


def make(input_shape: tuple[int, ...], num_outputs: int, *, kind: str) -> nn.Module:
    own: nn.Module = globals()[kind](math.prod(input_shape), num_outputs)
    return own


def experiment(kind: str, client: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "rounds": 2,
        "callbacks": [],
        "model": {"name": f"{HERE}:make", "kind": kind, "output": "logits" if kind == "Smoothed" else ""},
        "partition": {"num_clients": 4, "name": "iid"},
        "client": {"local_steps": 2, **client},
        "server": {"cohort_size": 2},
        **changes,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": {"name": "moon"}},  # asks for representations too
        pytest.param({"engine": {"workers": 2}}, marks=[pytest.mark.slow, pytest.mark.needs("workers")]),
    ],
    ids=["one", "moon", "workers"],
)
def test_a_models_own_smoothed_loss_trains_the_bits_of_label_smoothing(changes: Any, tmp_path: Path) -> None:
    """The reported loss stays the task's."""

    def trained(kind: str, client: Mapping[str, Any]) -> Any:
        return run(experiment(kind, client, results={"root": str(tmp_path)}, **changes))

    expected, own = trained("Net", {"label_smoothing": SMOOTHING}), trained("Smoothed", {"loss": "model"})
    tensors = own.model().state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.model().state_dict().items())
    assert [each["loss"] for each in own.rounds] == [each["loss"] for each in expected.rounds]
    plain = trained("Smoothed", {}).model().state_dict()
    assert not torch.equal(plain["head.weight"], tensors["head.weight"])


REFUSED: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "no labels": ("Net", {}, r"the forward of model\.name=.*:make does not take labels"),
    "no loss": ("OnlyLogits", {}, r"gives outputs of float32 and of shape \[4, 10\] for a batch with labels"),
    "per sample": ("PerSample", {}, r"client\.loss=model .* gives a tensor of shape \[4\] as the loss of a batch"),
    "not a number": ("NotANumber", {}, "gives nan as the loss of a batch"),
    "label smoothing": ("Smoothed", {"label_smoothing": 0.1}, r"client\.label_smoothing=0\.1 changes the task's loss"),
    "temperature": ("Smoothed", {"temperature": 2.0}, r"client\.temperature=2\.0 changes the task's loss"),
    "micro-batches": ("Smoothed", {"micro_batch": 2}, r"client\.micro_batch=2 cuts the batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_use_for_it_is_one_sentence(case: str) -> None:
    kind, client, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        check(from_dict(experiment(kind, {"loss": "model", **client})))


@pytest.mark.parametrize(
    "client",
    [
        pytest.param({"path": "cohort"}, marks=pytest.mark.needs("cohort")),
        pytest.param({"sharding": {"ranks": 2}}, marks=pytest.mark.needs("sharding")),
    ],
    ids=["cohort", "sharding"],
)
def test_paths_that_cannot_use_it_say_so(client: Mapping[str, Any]) -> None:
    check(from_dict(experiment("Net", client)))  # refused for nothing else
    with pytest.raises(ConfigError, match=r"client\.loss=model is "):
        check(from_dict(experiment("Smoothed", {"loss": "model", **client})))


@pytest.mark.needs("cohort")
def test_the_automatic_path_trains_with_it(tmp_path: Path) -> None:
    auto, sequential = (
        run(experiment("Smoothed", {"loss": "model", "path": path}, results={"root": str(tmp_path)})).rounds
        for path in ("auto", "sequential")
    )
    assert auto == sequential
