"""clients.jsonl against what the model, the test samples and the round's own record say."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedsign.client_metrics.accuracy import on_label_distributions
from fedsign.client_metrics.recording import ClientMetrics
from fedsign.config import from_dict
from fedsign.federation.exchange import Traffic
from fedsign.storage.results import RunFolder, read_records
from fedsign.workload import Workload
from simulations.api import Run, run
from simulations.verify import verify

SMALL = {
    "rounds": 2,
    "callbacks": [],
    "partition": {"num_clients": 6},
    "server": {"cohort_size": 3},
    "model": {"hidden": [16]},
    "client": {"local_epochs": 1},
}


def small(root: Path, **changes: Mapping[str, Any] | int) -> dict[str, Any]:
    tree: dict[str, Any] = {**SMALL, "results": {"root": str(root), "checkpoint_every": 1}}
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, Mapping) else value
    return tree


def records(done: Run) -> list[dict[str, Any]]:
    return read_records(done.path / "clients.jsonl")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(small(tmp_path_factory.mktemp("reference")))


def test_a_clients_accuracy_is_that_on_test_samples_weighted_to_its_labels(reference: Run) -> None:
    """Each test sample of class k weighs n_k(client) / n_k(test): as if the client's proportions had been drawn."""
    work = Workload(from_dict(small(reference.path)))
    model, test = work.make_model(), work.dataset.test
    model.load_state_dict(load_file(reference.path / "model.safetensors"))
    with torch.no_grad():
        is_right = model.eval()(test.features).argmax(dim=1) == test.targets
    last, counts = records(reference)[-1], work.label_counts()
    found = on_label_distributions([last["class_accuracy"]], counts)[0]
    for client, row in enumerate(counts):
        weights = torch.tensor(row, dtype=torch.float64) / torch.bincount(test.targets, minlength=10)
        own = weights[test.targets]
        assert found[client] == pytest.approx(float((own * is_right).sum() / own.sum()), abs=1e-6)
    assert found.max() - found.min() > 0.05  # the clients do differ


@pytest.mark.parametrize("path", ["sequential", "auto"])
def test_the_clients_add_up_to_the_rounds_record(path: str, tmp_path: Path) -> None:
    """mean |u_k|^2 = |mean u|^2 (1 + client drift^2), and the training loss is the mean weighted by samples."""
    done = run(small(tmp_path, client={"path": path}))
    sizes = Workload(from_dict(small(tmp_path))).label_counts()
    for of_clients, of_round in zip(records(done), done.rounds, strict=True):
        assert (of_clients["round"], of_clients["clients"]) == (of_round["round"], of_round["clients"])
        assert of_clients["num_examples"] == [sum(sizes[client]) for client in of_clients["clients"]]
        squares = [drift**2 for drift in of_clients["drift"]]
        expected = of_round["update_norm"] ** 2 * (1 + of_round["client_drift"] ** 2)
        assert sum(squares) / len(squares) == pytest.approx(expected, rel=1e-5)
        assert len(set(squares)) == len(squares)
        losses = zip(of_clients["num_examples"], of_clients["train_loss"], strict=True)
        mean = sum(num * loss for num, loss in losses) / sum(of_clients["num_examples"])
        assert mean == pytest.approx(of_round["train_loss"], rel=1e-6)


def test_the_drift_of_a_client_is_the_norm_of_its_own_update(tmp_path: Path) -> None:
    """With one client in the round, FedAvg's new model is that client's."""
    tree = small(tmp_path, rounds=1, server={"cohort_size": 1}, strategy={"name": "fedavg"})
    done = run(tree)
    after, before = load_file(done.path / "model.safetensors"), Workload(from_dict(tree)).make_model().state_dict()
    norm = math.sqrt(sum(float((after[name] - before[name]).double().square().sum()) for name in before))
    assert records(done)[0]["drift"] == [pytest.approx(norm, rel=1e-6)]


def test_large_tensors_count_in_the_norms_of_a_stack_too(tmp_path: Path) -> None:
    """A layer of 64 * 4096 weights is added by blocks."""
    wide = {"model": {"hidden": [4096]}, "rounds": 1}
    one, stack = (
        records(run(small(tmp_path / path, client={"path": path}, **wide)))[0] for path in ("sequential", "auto")
    )
    assert stack["drift"] == pytest.approx(one["drift"], rel=1e-4)


def test_a_resumed_run_writes_the_same_records(reference: Run, tmp_path: Path) -> None:
    done = run(small(tmp_path, rounds=1))
    RunFolder(done.path).append("clients.jsonl", {"round": 2, "clients": []})  # as if killed before the checkpoint
    resumed = run({"rounds": 2}, resume=done.path)
    assert (resumed.path / "clients.jsonl").read_bytes() == (reference.path / "clients.jsonl").read_bytes()


def test_verify_finds_a_changed_record(tmp_path: Path) -> None:
    done = run(small(tmp_path, rounds=1))
    file = done.path / "clients.jsonl"
    assert dict(verify(done.path))[file] == ""
    file.write_text(file.read_text().replace('"drift"', '"Drift"'))
    assert "clients.jsonl is missing or damaged" in dict(verify(done.path))[file]


def test_no_file_and_the_same_run_without_client_metrics(reference: Run, tmp_path: Path) -> None:
    tree = small(tmp_path, results={"clients": False})
    done = run(tree)
    assert not (done.path / "clients.jsonl").exists()
    assert (done.path / "rounds.jsonl").read_bytes() == (reference.path / "rounds.jsonl").read_bytes()
    assert from_dict(tree).result_settings() == from_dict(small(tmp_path)).result_settings()


@pytest.mark.needs("privacy")
@pytest.mark.parametrize("name", ["central", "local"])
def test_no_file_where_privacy_protects_the_clients(name: str, tmp_path: Path) -> None:
    privacy = {"name": name, "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.01}
    assert not (run(small(tmp_path, rounds=1, privacy=privacy)).path / "clients.jsonl").exists()


@pytest.mark.parametrize(("num_classes", "outputs"), [(0, torch.zeros(2, 1)), (2, torch.zeros(2, 3, 2))])
def test_without_labels_there_is_no_class_accuracy(num_classes: int, outputs: torch.Tensor, tmp_path: Path) -> None:
    """A regression has no class names; per-token outputs have a dimension more."""
    hook = ClientMetrics(RunFolder(tmp_path), num_classes=num_classes)
    hook.end(Traffic())
    hook.on_outputs(outputs, torch.zeros(2, dtype=torch.int64))
    hook.write({"round": 1}, durable=False)
    (record,) = read_records(tmp_path / "clients.jsonl")
    assert record["class_accuracy"] is None


def test_a_withheld_loss_is_null(tmp_path: Path) -> None:
    hook = ClientMetrics(RunFolder(tmp_path), num_classes=0)
    hook.end(Traffic(accepted=[4, 2], num_examples=[5, 6], train_losses=[0.123456789, None]))
    hook.write({"round": 1}, durable=False)
    (line,) = (tmp_path / "clients.jsonl").read_text().splitlines()
    assert json.loads(line)["train_loss"] == [0.1234568, None]
