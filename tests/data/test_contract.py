"""The contract for samples: what arrives, by whatever route, is what was given, as float32, int64, and positions."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from fedsign.config import from_dict
from fedsign.data.base import Dataset, LazySamples, Samples
from fedsign.data.checks import checked_dataset
from fedsign.errors import DataError
from fedsign.workload import Workload
from simulations.api import run

NUM, CUT = 60, 48
X = torch.randn(NUM, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(NUM) % 3
NAMES = ("a", "b", "c")
GIVEN: dict[str, Any] = {}


class Items:
    """A map-style Dataset of the given items."""

    def __init__(self, items: Any, **attributes: Any) -> None:
        self.items = items
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Table(Items):
    """Items with columns, as in `datasets`: a column can be asked for by its name."""

    def __getitem__(self, index: Any) -> Any:
        return [item[index] for item in self.items] if isinstance(index, str) else self.items[index]


def given(seed: int) -> Any:
    return GIVEN["data"]


def pair(x: Any, y: Any) -> tuple[TensorDataset, TensorDataset]:
    return TensorDataset(x[:CUT], y[:CUT]), TensorDataset(x[CUT:], y[CUT:])


def items(y: Any, x: Any = X, **attributes: Any) -> tuple[Items, Items]:
    both = [*zip(x, y, strict=True)]
    return Items(both[:CUT], **attributes), Items(both[CUT:])


def arrays(x: Any, y: Any, class_names: tuple[str, ...] = NAMES, owners: Any = None) -> Dataset:
    train = Samples(features=x[:CUT], targets=y[:CUT], owners=None if owners is None else owners[:CUT])
    return Dataset(train=train, test=Samples(features=x[CUT:], targets=y[CUT:]), class_names=class_names)


def read(data: Any) -> Dataset:
    return checked_dataset(data, name="mine")


def workload(data: Any, **tree: Any) -> Workload:
    GIVEN["data"] = data
    shared: dict[str, Any] = {
        "rounds": 2,
        "callbacks": [],
        "data": {"name": f"{__name__}:given"},
        "partition": {"name": "iid", "num_clients": 4},
        "server": {"cohort_size": 2},
        "client": {"batch_size": 4},
        "model": {"name": "linear"},
    }
    return Workload(from_dict(shared | tree))


def trained(data: Any, folder: Path, **tree: Any) -> list[dict[str, Any]]:
    return run(workload(data, **tree).config.replace(**{"results.root": str(folder)})).rounds


REGRESSION: dict[str, Any] = {"task": "regression", "metrics": ["rmse"]}


# -- features ----------------------------------------------------------------------------------------------------------

FLOATS: dict[str, Callable[[], tuple[Any, Tensor]]] = {
    "float64": lambda: (X.double(), X),
    "float16": lambda: (X.half(), X.half().float()),
    "bfloat16": lambda: (X.bfloat16(), X.bfloat16().float()),
    "big-endian": lambda: (X.numpy().astype(">f8"), X),
    "reversed": lambda: (X.numpy()[::-1], X.flip(0)),
    "strided": lambda: (X.repeat(1, 2).numpy()[:, ::2], X.repeat(1, 2)[:, ::2]),
    "read-only": lambda: (np.broadcast_to(X[:1].numpy(), X.shape), X[:1].expand(NUM, 5)),
    "lists": lambda: (X.tolist(), X),
    "sparse": lambda: (X.to_sparse(), X),
    "bytes": lambda: ((X.abs() * 50).to(torch.uint8), (X.abs() * 50).to(torch.uint8) / 255),
    "booleans": lambda: (X > 0, (X > 0).float()),
    "unsigned": lambda: ((X.abs() * 50).numpy().astype(np.uint16), (X.abs() * 50).long()),
}


@pytest.mark.parametrize("kind", FLOATS)
def test_features_of_any_type_arrive_with_their_values(kind: str) -> None:
    x, expected = FLOATS[kind]()
    train = Samples(features=x, targets=LABELS)
    found = read(Dataset(train=train, test=train, class_names=NAMES))
    assert isinstance(found.train, Samples)
    assert found.train.features.dtype == expected.dtype and torch.equal(found.train.features, expected)
    if kind not in ("lists", "sparse", "strided"):
        streamed = read((Items([*zip(x, LABELS, strict=True)]), Items([*zip(x, LABELS, strict=True)])))
        assert torch.equal(streamed.train.features, expected)
    assert bool(found.read_as) == (kind not in ("reversed", "strided", "read-only", "sparse"))


class Bag(nn.Module):
    seen: torch.dtype | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        Bag.seen = tokens.dtype
        found: Tensor = self.out(self.embedding(tokens).mean(dim=1))
        return found


def bag(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Bag()


@pytest.mark.parametrize("lazy", [False, True])
def test_integers_reach_a_model_of_ones_own_as_integers_and_others_as_floats(tmp_path: Path, lazy: bool) -> None:
    tokens = (X.abs() * 3).int().clamp_max(8)
    data = items(LABELS.tolist(), tokens) if lazy else pair(tokens, LABELS)
    own, built_in = {"model": {"name": f"{__name__}:bag"}}, {"model": {"name": "linear"}}
    assert trained(data, tmp_path, **own)[-1]["failures"] == [] and Bag.seen == torch.int64
    assert trained(data, tmp_path, **built_in)[-1]["failures"] == []
    first, second = workload(data, **own), workload(data, **built_in)
    assert first.dataset.train.features.dtype == torch.int64
    second.take_data(first)
    assert second.dataset.train.features.dtype == torch.float32


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"client": {"batch_size": 4, "path": "cohort"}}, marks=pytest.mark.needs("cohort")),
        pytest.param({"engine": {"workers": 2}}, marks=[pytest.mark.slow, pytest.mark.needs("workers")]),
        pytest.param(
            {"client": {"batch_size": 4, "sharding": {"ranks": 2}}},
            marks=[pytest.mark.slow, pytest.mark.needs("sharding")],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("features", "model"),
    [((X.abs() * 3).int().clamp_max(8), f"{__name__}:bag"), (X.half(), "linear"), (X.double(), "linear")],
    ids=["tokens", "float16", "float64"],
)
def test_features_of_any_type_train_alike_on_every_path(
    features: Tensor, model: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    data, own = pair(features, LABELS), {"model": {"name": model}}
    losses = [[line["loss"] for line in trained(data, tmp_path, **own, **each)] for each in ({}, changes)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


# -- targets -----------------------------------------------------------------------------------------------------------


def test_a_column_of_targets_trains_as_the_targets_do(tmp_path: Path) -> None:
    y = 2 * X[:, 0]
    columns = (pair(X, y[:, None]), items(y[:, None]), arrays(X, y[:, None], ()))
    lines = trained(pair(X, y), tmp_path, **REGRESSION)
    assert all(trained(data, tmp_path, **REGRESSION) == lines for data in columns)
    assert trained(pair(X, LABELS[:, None]), tmp_path) == trained(pair(X, LABELS), tmp_path)


def test_vectors_of_numbers_are_trained_alike_on_both_paths(tmp_path: Path) -> None:
    """y = (2 x_0, -x_1) is linear, so that the RMSE falls towards 0."""
    y = torch.stack([2 * X[:, 0], -X[:, 1]], dim=1)
    shared: dict[str, Any] = {**REGRESSION, "rounds": 30}
    one, stack = (
        trained(pair(X, y), tmp_path, **shared, client={"batch_size": 5, "lr": 0.1, "path": path})
        for path in ("sequential", "cohort")
    )
    assert one[-1]["rmse"] < 0.05 < one[0]["rmse"]
    assert one[-1]["rmse"] == pytest.approx(stack[-1]["rmse"], rel=1e-3)


TEXTS = [NAMES[label] for label in LABELS]
CLASSES: dict[str, Callable[[], Any]] = {
    "texts": lambda: items(TEXTS),
    "np.str_": lambda: items(np.array(TEXTS)),
    "texts in the order of classes": lambda: items(TEXTS, classes=NAMES),
    "one-hot": lambda: pair(X, torch.eye(3, dtype=torch.int64)[LABELS]),
    "one-hot floats": lambda: items(torch.eye(3)[LABELS]),
    "columns": lambda: pair(X, LABELS[:, None].to(torch.int8)),
    "from 1": lambda: items(LABELS + 1),
    "arrays": lambda: arrays(X.numpy(), LABELS.numpy()),
    "lists of texts": lambda: arrays(X.numpy(), TEXTS),
    "objects": lambda: arrays(X, np.array(TEXTS, dtype=object)),
    "dictionaries": lambda: tuple(
        Items([{"id": 7, "label": int(y), "img": x} for x, y in zip(X[part], LABELS[part], strict=True)])
        for part in (slice(CUT), slice(CUT, NUM))
    ),
    "a mapping": lambda: dict(zip(("train", "test"), items(LABELS.tolist()), strict=True)),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_labels_of_any_type_are_the_same_classes(kind: str) -> None:
    data = read(CLASSES[kind]())
    assert torch.equal(data.train.targets, LABELS[:CUT]) and torch.equal(data.test.targets, LABELS[CUT:])
    assert torch.equal(data.train.features, X[:CUT])
    assert len(data.class_names) == data.num_outputs == 3
    assert ("a" in data.class_names) == (kind in ("arrays", "objects") or "text" in kind or kind == "np.str_")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", ["tensors", "items", "dictionaries"])
def test_an_integer_of_test_samples_only_is_a_class(kind: str, first: int) -> None:
    labels = LABELS + first
    labels[CUT] = first + 3
    data: Any = pair(X, labels) if kind == "tensors" else items(labels)
    if kind == "dictionaries":
        data = tuple(Items([{"x": x, "label": int(y)} for x, y in part.items]) for part in data)
    found = read(data)
    assert found.class_names == tuple(str(first + label) for label in range(4))
    assert found.test.targets[0] == 3 and torch.equal(found.train.targets, LABELS[:CUT])


def test_rows_with_no_1_or_two_are_several_labels_and_not_one_hot() -> None:
    for change in ([0, 0, 0], [1, 1, 0]):
        y = torch.eye(3, dtype=torch.int64)[LABELS]
        y[0] = torch.tensor(change)
        data = read(pair(X, y))
        assert data.target.kind == "several labels per sample" and torch.equal(data.train.targets, y[:CUT])


def test_columns_are_taken_by_name_and_what_is_left_out_is_said() -> None:
    rows = [{"idx": 0, "pixel_values": x, "label": int(y)} for x, y in zip(X, LABELS, strict=True)]
    table = Table(rows, column_names=["idx", "pixel_values", "label"])
    data = read((table, table))
    assert "the column 'pixel_values' holds the features, and 'label' the target; idx is not used." in data.read_as
    with pytest.raises(
        DataError, match=r"columns image, x, label; expected exactly one of .* for the features: rename"
    ):
        read((Items([{"image": 1, "x": 2, "label": 0}]), table))
    with pytest.raises(DataError, match=r"columns x, fine, coarse; expected exactly one of .* for the target: rename"):
        read((Items([{"x": X[0], "fine": 1, "coarse": 0}]), table))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: pair(X, torch.where(LABELS == 1, 30_000_000, LABELS)), "30,000,001 outputs; number the classes"),
        (lambda: pair(X, torch.where(LABELS == 1, -5, LABELS)), "the label -5; expected labels from 0"),
        (lambda: items([*TEXTS[:-1], "d"]), r"the class 'd' among the test targets, .* are a, b, c; give training"),
        (lambda: items([1, "a"] * 30), "training targets of the types int, str; expected numbers or texts"),
        (lambda: items([[1], [1, 2]] * 30), "training targets of different shapes"),
        (lambda: items([None, *LABELS.tolist()[1:]]), "training targets of the types NoneType, int"),
        (lambda: pair(X, LABELS * 1j), "training targets of torch.complex64"),
        (lambda: arrays(X, LABELS + 0.5), "training targets that are not integers from 0 to 2"),
        (lambda: arrays(X, torch.eye(4, dtype=torch.int64)[LABELS]), "of 4 columns, but 3 class names"),
        (lambda: (pair(X, LABELS)[0], pair(X, LABELS[:, None].repeat(1, 2))[1]), r"of the shape \[\] each and test"),
        (lambda: arrays(X.to(torch.complex64), LABELS), "training features of torch.complex64; expected real numbers"),
        (lambda: arrays(X.numpy().astype(str), LABELS), "training features of <U.*; expected numbers"),
        (lambda: arrays(X / 0, LABELS), r"training features that are NaN or infinite \(240, the first at \[0, 0\]\)"),
        (lambda: arrays(X.double() * 1e300, LABELS), "training features that are NaN or infinite"),
        (lambda: items([{}] * NUM), "training targets of the types dict"),
    ],
)  # fmt: skip
def test_what_cannot_arrive_is_refused_in_one_sentence(data: Callable[[], Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"^data.name=mine gives .*{said}") as caught:
        read(data())
    assert "\n" not in str(caught.value)


def test_an_item_that_cannot_be_read_is_named() -> None:
    class Broken(Items):
        def __getitem__(self, index: int) -> Any:
            return self.items[index] if index < 3 else 1 / 0

    with pytest.raises(DataError, match=r"whose item 3 of 60 cannot be read: its __getitem__ raises ZeroDivisionError"):
        read((Broken([*zip(X, LABELS, strict=True)]), items(LABELS)[1]))


def test_a_huge_label_takes_no_memory() -> None:
    """Names of 30 million classes would take more than a gigabyte."""
    tracemalloc.start()
    with pytest.raises(DataError, match="30,000,001 outputs"):
        read(items([30_000_000, *range(NUM - 1)]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


# -- owners ------------------------------------------------------------------------------------------------------------

OWNERS: dict[str, Any] = {
    "texts": [f"clinic {each}" for each in LABELS.tolist()],
    "an array of texts": np.array([f"clinic {each}" for each in LABELS.tolist()]),
    "large": LABELS * 10**12 - 5,
    "tuples": [("north", int(each)) for each in LABELS],
    "rows": np.stack([LABELS.numpy(), LABELS.numpy()], axis=1),
    "floats": LABELS.double(),
    "without an order": [int(each) or "none" for each in LABELS],
}


@pytest.mark.parametrize("kind", OWNERS)
@pytest.mark.parametrize("lazy", [False, True])
def test_owners_of_any_type_divide_the_samples_alike(kind: str, lazy: bool) -> None:
    owners = OWNERS[kind][:CUT]
    data = items(LABELS, owners=owners) if lazy else arrays(X, LABELS, owners=OWNERS[kind])
    plain = arrays(X, LABELS, owners=LABELS.numpy())
    natural: dict[str, Any] = {"partition": {"name": "natural", "num_clients": 3}}
    work = workload(data, **natural)
    shares = [share.tolist() for share in work.partition]
    expected = [share.tolist() for share in workload(plain, **natural).partition]
    assert shares == expected
    assert any("owners are numbered: 0 " in each for each in work.dataset.read_as)


@pytest.mark.parametrize(
    ("owners", "said"),
    [
        (["a"] * 3, "3 owners for 48 samples"),
        ([None, *["a"] * 47], "the one at 0 is missing"),
        ([{"a"}] * 48, "owners of the type set"),
    ],
)
def test_owners_that_are_none_are_one_sentence(owners: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(items(LABELS, owners=owners))


def test_a_subset_has_its_own_owners_whatever_their_type() -> None:
    whole = items(TEXTS, owners=[f"clinic {each}" for each in range(CUT)])
    data = read((Subset(whole[0], [5, 3, 4]), items(TEXTS)[1]))
    assert isinstance(data.train, LazySamples) and data.train.owners is not None
    assert data.train.owners.tolist() == [2, 0, 1] and data.train.targets.tolist() == LABELS[[5, 3, 4]].tolist()
