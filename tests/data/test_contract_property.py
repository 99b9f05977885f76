"""Any data by any route: what the contract accepts trains two rounds, what it refuses is one sentence; nothing else.

`SAMPLES_EXAMPLES=2000 pytest tests/data/test_contract_property.py` tries more.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsign.data.base import Dataset, Samples
from fedsign.errors import FedSignError
from simulations.api import run

NUM_TRAIN, NUM_TEST = 24, 8
FOREIGN = ("RuntimeError", "TypeError", "ValueError", "IndexError", "KeyError", "AttributeError", "bug in FedSign")
FEATURES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int64", ">f8", "bool", "complex64", "texts")
SHAPES = ((3,), (1,), (2, 2), (1, 4, 4), (), (0,))
TARGETS = (
    "labels", "column of labels", "texts", "bytes", "booleans", "one-hot", "one-hot floats", "labels from 1",
    "a huge label", "a negative label", "numbers", "float64", "float16", "column of numbers", "vectors", "several",
    "masks", "real masks", "NaN", "complex", "objects", "ragged",
)  # fmt: skip
OWNERS = ("none", "integers", "large", "texts", "tuples", "mixed", "tensor", "too few", "missing", "lists")
ROUTES = ("Dataset", "tensors", "items", "dictionaries", "npz")
PARTITIONS = ("iid", "dirichlet", "natural", "virtual", "shards", "quantity", "classes")
TASKS: dict[str, dict[str, Any]] = {
    "classification": {"task": "classification", "metrics": ["accuracy", "f1"]},
    "regression": {"task": "regression", "metrics": ["rmse"]},
    "own": {"task": f"{__name__}:Own", "metrics": [], "model": {"name": f"{__name__}:own_model"}},
}


class Own:
    """Takes targets of any shape."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.mean(dim=1) - targets.float().reshape(len(targets), -1).mean(dim=1)).square().mean()


class AsFloats(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(int(np.prod(input_shape)), num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.layer(features.float().flatten(1))
        return out


def own_model(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return AsFloats(input_shape, num_outputs)


@dataclass(frozen=True)
class Case:
    route: str
    features: str
    shape: tuple[int, ...]
    targets: str
    owners: str
    as_array: bool

    def part(self, num: int) -> tuple[Any, Any, Any]:
        """Features, targets and owners of `num` samples."""
        labels = np.arange(num) % 3
        x = np.random.default_rng(num).random((num, *self.shape)) + labels.reshape(-1, *(1,) * len(self.shape))
        return features_like(x, self.features, self.as_array), targets_like(labels, self.targets), self.owned(num)

    def owned(self, num: int) -> Any:
        ids = np.arange(num) % 4
        match self.owners:
            case "integers":
                return ids
            case "large":
                return (ids - 2) * 10**12
            case "texts":
                return np.array([f"clinic {each}" for each in ids])
            case "tuples":
                return [("clinic", int(each)) for each in ids]
            case "mixed":
                return [int(each) if each else "clinic" for each in ids]
            case "tensor":
                return torch.from_numpy(ids)
            case "too few":
                return ids[:-1]
            case "missing":
                return [None, *ids[1:]]
            case "lists":
                return [{int(each)} for each in ids]
        return None


def features_like(x: Any, kind: str, as_array: bool) -> Any:
    if kind == "texts":
        return x.astype(str)
    if kind == "bfloat16":
        return torch.from_numpy(x).bfloat16()
    array = (x * 3).astype(kind) if kind in ("uint8", "int8", "int64") else x.astype(kind)
    return array if as_array or kind == ">f8" else torch.from_numpy(array)


def targets_like(labels: Any, kind: str) -> Any:
    num = len(labels)
    grid = labels[:, None, None] + np.zeros((2, 2), int)
    match kind:
        case "column of labels":
            return labels[:, None]
        case "texts":
            return [f"kind {each}" for each in labels]
        case "bytes":
            return np.array([f"kind {each}" for each in labels]).astype("S")
        case "booleans":
            return labels > 0
        case "one-hot":
            return np.eye(3, dtype=int)[labels]
        case "one-hot floats":
            return torch.eye(3)[torch.from_numpy(labels)]
        case "labels from 1":
            return torch.from_numpy(labels + 1)
        case "a huge label":
            return np.where(labels == 2, 30_000_000, labels)
        case "a negative label":
            return np.where(labels == 2, -5, labels)
        case "numbers" | "float64" | "float16":
            return (labels + 0.5).astype({"numbers": "float32"}.get(kind, kind))
        case "column of numbers":
            return torch.from_numpy(labels[:, None] + 0.5)
        case "vectors":
            return np.stack([labels + 0.5, 1.5 - labels], axis=1)
        case "several":
            return np.stack([labels > 0, labels > 1, labels > -1], axis=1).astype(np.uint8)
        case "masks":
            return grid
        case "real masks":
            return torch.from_numpy(grid / 2)
        case "NaN":
            return np.where(np.arange(num) == 1, np.nan, labels)
        case "complex":
            return labels + 1j
        case "objects":
            return np.array([None, *labels[1:]], dtype=object)
        case "ragged":
            return [[1] * (1 + int(each)) for each in labels]
    return labels


class Items:
    def __init__(self, x: Any, y: Any, owners: Any, *, as_dictionaries: bool) -> None:
        self.x, self.y, self.owners, self._is_dictionary = x, y, owners, as_dictionaries

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        pair = self.x[index], self.y[index]
        return {"img": pair[0], "id": index, "label": pair[1]} if self._is_dictionary else pair


CURRENT: dict[str, Case] = {}


def factory(seed: int) -> Any:
    """The data of the current case."""
    case = CURRENT["case"]
    parts = [case.part(NUM_TRAIN), case.part(NUM_TEST)]
    if case.route == "Dataset":
        train, test = (Samples(features=x, targets=y, owners=owners) for x, y, owners in parts)
        is_real = case.targets in (
            "numbers",
            "float64",
            "float16",
            "column of numbers",
            "vectors",
            "masks",
            "real masks",
        )
        return Dataset(train=train, test=test, class_names=() if is_real else ("kind 0", "kind 1", "kind 2"))
    if case.route == "tensors":
        return tuple(TensorDataset(torch.as_tensor(x), torch.as_tensor(y)) for x, y, _ in parts)
    return tuple(Items(*part, as_dictionaries=case.route == "dictionaries") for part in parts)


def save(case: Case, file: Path) -> None:
    (x, y, owners), (test_x, test_y, _) = case.part(NUM_TRAIN), case.part(NUM_TEST)
    arrays = {"x_train": x, "y_train": y, "x_test": test_x, "y_test": test_y}
    np.savez(
        file,
        **{name: np.asarray(each) for name, each in arrays.items()},
        **({} if owners is None else {"owners_train": np.asarray(owners)}),
    )


def is_possible(case: Case) -> bool:
    """Whether torch and NumPy can hold the case at all, before FedSign sees it."""
    x, y = case.part(NUM_TRAIN)[:2]
    try:
        if case.route == "npz":
            if not all(
                np.asarray(each).dtype.kind != "O"
                for each in (x, y, *([] if case.owners == "none" else [case.owned(4)]))
            ):
                return False
        elif case.route == "tensors":
            TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def mostly(good: tuple[Any, ...], every: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Any value, but four times out of five a good one: a case with two defects is refused for the first."""
    return st.sampled_from(good * (4 * len(every) // len(good)) + every)


CASES = st.builds(
    Case,
    route=st.sampled_from(ROUTES),
    features=mostly(FEATURES[:9], FEATURES),
    shape=mostly(SHAPES[:4], SHAPES),
    targets=mostly(TARGETS[:8] + TARGETS[10:17], TARGETS),
    owners=mostly(OWNERS[:7], OWNERS),
    as_array=st.booleans(),
).filter(is_possible)


@pytest.mark.needs("tables")
@settings(
    deadline=None,
    max_examples=int(os.environ.get("SAMPLES_EXAMPLES", "40")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)
@given(CASES, st.sampled_from(PARTITIONS), st.sampled_from((*TASKS, "own")))
@example(Case("tensors", "float32", (3,), "column of numbers", "none", False), "iid", "regression")
@example(Case("items", "int64", (3,), "vectors", "texts", True), "natural", "regression")
@example(Case("Dataset", "float64", (3,), "masks", "none", True), "dirichlet", "own")
def test_what_is_accepted_trains_and_what_is_refused_is_one_sentence(
    tmp_path: Path, case: Case, partition: str, task: str
) -> None:
    CURRENT["case"] = case
    data: dict[str, Any] = {"name": f"{__name__}:factory"}
    if case.route == "npz":
        save(case, tmp_path / "data.npz")
        data = {"name": "npz", "path": str(tmp_path / "data.npz")}
    tree = {
        "rounds": 2,
        "callbacks": [],
        "data": data,
        "model": {"name": "linear"},
        "partition": {"name": partition, "num_clients": 3},
        "client": {"batch_size": 8, "lr": 1e-5},
        "server": {"cohort_size": 2},
        "results": {"root": str(tmp_path / "runs")},
        **TASKS[task],
    }
    if partition == "virtual":
        tree["partition"] |= {"samples_per_client": 6}
    if partition == "dirichlet":
        tree["partition"] |= {"min_partition_size": 1}
    try:
        rounds = run(tree).rounds
    except FedSignError as error:
        event("refused")
        assert str(error).count("\n") == 0 and str(error).endswith((".", "?"))
        assert not any(name in str(error) for name in FOREIGN), error
    else:
        event("trained")
        assert len(rounds) == 2 and all(record["failures"] == [] for record in rounds), rounds
        assert np.isfinite(rounds[-1]["loss"])
