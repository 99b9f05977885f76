"""Lazily loaded samples equal eager ones, and torch Datasets are accepted as they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset

from fedsign.config import from_dict
from fedsign.data.base import Dataset, LazySamples, Samples, features_of, normalized
from fedsign.data.checks import checked_dataset
from fedsign.data.normalize import Normalization
from fedsign.data.torch_dataset import from_torch
from fedsign.errors import DataError
from fedsign.workload import Workload
from simulations.api import run

FEATURES = torch.rand(30, 3, 4, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(30) % 3


class Counting(TorchDataset[tuple[Tensor, int]]):
    """A map-style dataset that writes down which items were asked for."""

    def __init__(self, features: Tensor = FEATURES, targets: Tensor = TARGETS) -> None:
        self.features, self.labels_ = features, targets
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        self.asked.append(position)
        return self.features[position], int(self.labels_[position])


class WithTargets(Counting):
    targets = TARGETS.tolist()
    owners = np.arange(30) // 10
    classes = ("cat", "dog", "ship")


def two_kinds() -> tuple[Samples, LazySamples]:
    owners = torch.arange(30) // 7
    memory = Samples(features=FEATURES, targets=TARGETS, owners=owners)
    return memory, LazySamples(source=Counting(), targets=TARGETS, owners=owners)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 29), min_size=1), st.data())
def test_both_kinds_of_samples_answer_alike_subset_by_subset(first: list[int], data: st.DataObject) -> None:
    second = data.draw(st.lists(st.integers(0, len(first) - 1), min_size=1))
    batch = torch.tensor(data.draw(st.lists(st.integers(0, len(second) - 1), min_size=1)))
    size = data.draw(st.integers(1, 40))
    memory, lazy = (each[np.array(first)][np.array(second)] for each in two_kinds())
    assert len(memory) == len(lazy) == len(second)
    assert memory.shape == lazy.shape == (3, 4, 4)
    assert torch.equal(memory.features, lazy.features)
    assert memory.owners is not None and lazy.owners is not None and torch.equal(memory.owners, lazy.owners)
    for one, other in zip(memory.batch(batch), lazy.batch(batch), strict=True):
        assert torch.equal(one, other)
    for parts in zip(memory.batches(size), lazy.batches(size), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(*parts, strict=True))


def test_only_what_a_batch_asks_for_is_fetched() -> None:
    source = Counting()
    lazy = LazySamples(source=source, targets=TARGETS)[np.array([5, 9, 20])]
    assert source.asked == []
    features, targets = lazy.to(torch.device("cpu")).batch(torch.tensor([2, 0]))
    assert source.asked == [20, 5]
    assert torch.equal(features, FEATURES[[20, 5]]) and targets.tolist() == [2, 2]


@pytest.mark.parametrize("preset", ["none", "default", "per_channel", "unit"])
def test_both_kinds_are_normalized_alike(preset: Any) -> None:
    customary = Normalization(shift=(0.1, 0.2, 0.3), scale=(0.4, 0.5, 0.6))
    memory, lazy = (
        normalized(Dataset(train=each, test=each, class_names=("a", "b", "c"), normalization=customary), preset)
        for each in two_kinds()
    )
    assert memory.normalization == lazy.normalization
    assert torch.equal(memory.test.features, lazy.test.features)
    assert torch.equal(memory.test.features, FEATURES) == (preset == "none")


@pytest.mark.parametrize("lazy", [True, False])
def test_a_normalization_upon_another_is_both(lazy: bool) -> None:
    samples: Samples | LazySamples = two_kinds()[lazy]
    first, second = Normalization(shift=(1.0,) * 3, scale=(2.0,) * 3), Normalization(shift=(3.0,) * 3, scale=(0.5,) * 3)
    expected = ((FEATURES - 1) / 2 - 3) / 0.5
    torch.testing.assert_close(samples.normalized(first).normalized(second).features, expected)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (torch.tensor([1, 2], dtype=torch.int32), [1, 2]),
        ({"label": 1, "img": np.array([1.5])}, [1.5]),
        (np.array([0.5, 1.5]), [0.5, 1.5]),
        ((torch.tensor([51], dtype=torch.uint8), "label"), [0.2]),
        ([np.array([1.0]), 3], [1.0]),
        (Image.new("L", (2, 1), 255), [[[1.0, 1.0]]]),
        (Image.new("RGB", (1, 1), (255, 0, 51)), [[[1.0]], [[0.0]], [[0.2]]]),
    ],
    ids=["integers", "dictionary", "array", "bytes", "pair", "gray image", "color image"],
)
def test_features_of_an_item(item: Any, expected: Any) -> None:
    found = features_of(item)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_features_of_different_shapes_are_a_sentence() -> None:
    source = [(torch.zeros(2), 0), (torch.zeros(3), 1)]
    with pytest.raises(DataError, match=r"shapes \[2\] and \[3\].*crop or resize"):
        LazySamples(source=source, targets=torch.tensor([0, 1])).batch(torch.tensor([0, 1]))


def test_targets_owners_and_names_are_taken_from_attributes_without_fetching() -> None:
    train, test = WithTargets(), WithTargets()
    data = from_torch(train, test)
    assert train.asked == test.asked == []
    assert torch.equal(data.train.targets, TARGETS) and data.class_names == ("cat", "dog", "ship")
    assert data.train.owners is not None and data.train.owners.tolist() == [0] * 10 + [1] * 10 + [2] * 10


@pytest.mark.parametrize("make", [Counting, WithTargets], ids=["items", "attributes"])
def test_a_subset_has_its_own_samples(make: Callable[[], Counting]) -> None:
    chosen = [7, 3, 20]
    data = from_torch(Subset(Subset(make(), [20, 7, 3]), [1, 2, 0]), make())
    assert data.train.targets.tolist() == TARGETS[chosen].tolist()
    assert torch.equal(data.train.features, FEATURES[chosen])


def test_without_attributes_the_items_are_gone_through_once() -> None:
    train = Counting()
    data = from_torch(train, Counting())
    assert train.asked == list(range(30))
    assert torch.equal(data.train.targets, TARGETS) and data.class_names == ("0", "1", "2")


def test_tensors_stay_in_memory_and_real_targets_are_a_regression() -> None:
    part = TensorDataset(FEATURES, TARGETS.double() / 7)
    data = from_torch(part, part)
    assert isinstance(data.train, Samples) and data.class_names == ()
    assert data.train.targets.dtype == torch.float32


class Both:
    def __init__(self) -> None:
        self.train, self.test = WithTargets(), WithTargets()


def test_a_pair_or_an_object_with_two_parts_is_a_data_set() -> None:
    for found in ((WithTargets(), WithTargets()), Both()):
        data = checked_dataset(found, name="mine")
        assert isinstance(data.train, LazySamples) and len(data.test) == 30


@pytest.mark.parametrize("found", [WithTargets(), (WithTargets(),), (WithTargets(), 3), ("train", "test"), None, {}])
def test_what_is_no_pair_of_datasets_is_refused(found: object) -> None:
    with pytest.raises(DataError, match=r"data.name=mine gives a .*expected a fedsign.data.base.Dataset, or a pair"):
        checked_dataset(found, name="mine")


def test_items_without_targets_are_refused() -> None:
    with pytest.raises(DataError, match=r"an item of the torch Dataset is of type Tensor; expected a tuple"):
        from_torch(FEATURES, FEATURES)


def streamed(seed: int) -> tuple[WithTargets, WithTargets]:
    return WithTargets(), WithTargets()


def kept(seed: int) -> tuple[TensorDataset, TensorDataset]:
    return TensorDataset(FEATURES, TARGETS), TensorDataset(FEATURES, TARGETS)


def trained(name: str, folder: Path, **data: Any) -> list[dict[str, Any]]:
    """The lines of a run of two rounds."""
    return run(
        {
            "rounds": 2,
            "callbacks": [],
            "data": {"name": f"{__name__}:{name}", **data},
            "partition": {"name": "iid", "num_clients": 3},
            "client": {"batch_size": 4},
            "server": {"cohort_size": 2},
            "results": {"root": str(folder)},
        }
    ).rounds


@pytest.mark.parametrize("data", [{}, {"augment": "crop_flip", "normalize": "per_channel"}], ids=["plain", "presets"])
def test_a_run_on_streamed_samples_has_the_bits_of_one_on_samples_in_memory(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    lines = trained("streamed", tmp_path, **data)
    assert lines == trained("kept", tmp_path, **data)
    assert lines[-1]["failures"] == []


def test_augmentation_changes_training_alone_and_repeats(tmp_path: Path) -> None:
    plain, flipped, again = (trained("kept", tmp_path, augment=augment) for augment in ("none", "flip", "flip"))
    assert flipped == again != plain


def test_a_model_is_evaluated_alike_on_streamed_samples_and_on_those_in_memory() -> None:
    figures = []
    for name in ("streamed", "kept"):
        data = {"name": f"{__name__}:{name}", "validation_fraction": 0.2}
        metrics = ["accuracy", "f1", "auc", "balanced_accuracy"]
        work = Workload(from_dict({"data": data, "metrics": metrics, "partition": {"num_clients": 10}}))
        figures.append(work.evaluate(work.make_model()))
    assert figures[0] == figures[1]
    assert {"loss", "validation_loss", "validation_auc"} < figures[0].keys()
