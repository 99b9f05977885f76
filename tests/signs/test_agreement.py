"""The streamed sign agreement equals that of all pairs, one by one."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsign.signs.agreement import METRICS, SignAgreement
from fedsign.storage.results import read_records
from simulations.api import run

SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "scale": ()}


def drawn(num_clients: int, seed: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Models of whole numbers from -2 to 2, so that zeros, in models and in updates, are common."""
    rng = np.random.default_rng(seed)

    def model() -> dict[str, Tensor]:
        return {
            name: torch.tensor(rng.integers(-2, 3, size=shape), dtype=torch.float32) for name, shape in SHAPES.items()
        }

    return [model() for _ in range(num_clients)], model()


def share(first: list[Tensor], second: list[Tensor]) -> float | None:
    """Of elements where both have a sign, those where it is the same one."""
    a, b = torch.cat(first).sign(), torch.cat(second).sign()
    both = (a != 0) & (b != 0)
    return float((a[both] == b[both]).double().mean()) if both.any() else None


def all_pairs(models: list[dict[str, Tensor]], received: dict[str, Tensor], names: list[str]) -> list[float | None]:
    """In the order of FIGURES."""

    def flat(tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].reshape(-1) for name in names])

    own = [flat(model) for model in models]
    steps = [model - flat(received) for model in own]
    found = []
    for vectors in (own, steps):
        pairs = list(permutations(vectors, 2))
        found.append(share([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None)
        found.append(share(vectors, [flat(received)] * len(vectors)))
    return found


@pytest.mark.parametrize("num_clients", [1, 2, 7])
@pytest.mark.parametrize("seed", range(5))
def test_every_layer_and_all_together(num_clients: int, seed: int) -> None:
    models, received = drawn(num_clients, seed)
    streamed, stacked, mixed = SignAgreement(), SignAgreement(), SignAgreement()
    for model in models:
        streamed.add(model, received)
    stack = {name: torch.stack([model[name] for model in models]) for name in SHAPES}
    stacked.add_stack(stack, received)
    mixed.add(models[0], received)
    if num_clients > 1:
        mixed.add_stack({name: tensor[1:] for name, tensor in stack.items()}, received)
    found = streamed.metrics()
    assert found == stacked.metrics() == mixed.metrics()
    assert list(found) == ["", *SHAPES]
    for name, metrics in found.items():
        expected = all_pairs(models, received, [name] if name else list(SHAPES))
        assert [metrics[metric] for metric in METRICS] == pytest.approx(expected)


def test_more_clients_than_a_byte_counts() -> None:
    received = {"a": torch.ones(5)}
    agreement = SignAgreement()
    for number in range(600):
        agreement.add({"a": torch.full((5,), -1.0 if number % 3 == 0 else 2.0)}, received)
    metrics = agreement.metrics()["a"]
    assert metrics["models_global"] == metrics["updates_global"] == pytest.approx(2 / 3)
    assert metrics["models"] == metrics["updates"] == pytest.approx((400 * 399 + 200 * 199) / (600 * 599))


def test_large_layers_are_counted_in_blocks() -> None:
    torch.manual_seed(0)
    received, models = {"a": torch.randn(200_001)}, [{"a": torch.randn(200_001)} for _ in range(3)]
    agreement = SignAgreement()
    for model in models:
        agreement.add(model, received)
    found = [agreement.metrics()["a"][metric] for metric in METRICS]
    assert found == pytest.approx(all_pairs(models, received, ["a"]))
    assert found[0] == pytest.approx(0.5, abs=0.01)  # independent signs


def test_nobody_and_nothing() -> None:
    assert SignAgreement().metrics() == {}
    agreement = SignAgreement()
    agreement.add({"a": torch.zeros(3)}, {"a": torch.zeros(3)})
    assert set(agreement.metrics()["a"].values()) == {None}


@pytest.mark.parametrize(
    "changes",
    [
        {"client": {"path": "cohort", "local_epochs": 1}},
        {"client": {"local_epochs": 1}, "strategy": {"name": "flower_fedavg"}},
        pytest.param(
            {"client": {"local_epochs": 1}, "engine": {"workers": 2}},
            marks=[pytest.mark.needs("workers"), pytest.mark.slow],
        ),
    ],
    ids=["cohort", "messages", "workers"],
)
def test_a_run_writes_the_same_agreement_whatever_way_its_replies_come(
    changes: dict[str, object], tmp_path: Path
) -> None:
    base = {"rounds": 2, "callbacks": [], "strategy": {"name": "fedavg"}, "client": {"local_epochs": 1}}
    runs = [
        run({**base, **each, "results": {"root": str(tmp_path / name), "signs": True}})
        for name, each in (("plain", {}), ("other", changes))
    ]
    lines = [read_records(each.path / "signs.jsonl") for each in runs]
    assert [line["round"] for line in lines[0]] == [1, 2]
    for first, second in zip(
        *([line[0]] for line in lines), strict=True
    ):  # Flower's FedAvg weighs by samples: other models then
        assert (
            first["layers"].keys()
            == second["layers"].keys()
            == {f"{layer}.{what}" for layer in (0, 2, 4) for what in ("weight", "bias")}
        )
        for layer, metrics in first["layers"].items():
            assert list(metrics) == list(METRICS)
            assert list(second["layers"][layer].values()) == pytest.approx(list(metrics.values()), abs=2e-3)
    for line in runs[0].rounds:
        assert all(0 < line[f"signs_{metric}"] < 1 for metric in METRICS)


def test_signs_are_gone_on_with_after_a_kill(tmp_path: Path) -> None:
    experiment = {
        "callbacks": [],
        "client": {"local_epochs": 1},
        "results": {"root": str(tmp_path), "signs": True, "checkpoint_every": 2},
    }
    done = run({**experiment, "rounds": 3})
    resumed = run({**experiment, "rounds": 5}, resume=done.path)
    whole = run({**experiment, "rounds": 5})
    assert (resumed.path / "signs.jsonl").read_text() == (whole.path / "signs.jsonl").read_text()
    assert resumed.rounds == whole.rounds


def test_a_run_that_was_not_asked_for_signs_has_none(tmp_path: Path) -> None:
    done = run({"rounds": 1, "callbacks": [], "client": {"local_epochs": 1}, "results": {"root": str(tmp_path)}})
    assert not (done.path / "signs.jsonl").exists()
    assert not [key for key in done.rounds[0] if key.startswith("signs")]
