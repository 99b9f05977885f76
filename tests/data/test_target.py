"""What a target is, is described once, and read by tasks, metrics, partitions and the doctor."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.data.partition.base import class_labels
from fedsign.data.target import TargetKind
from fedsign.errors import ConfigError, DataError
from fedsign.metrics.rmse import rmse
from fedsign.tasks.regression import Regression
from fedsign.workload import Workload

LABELS = torch.arange(24) % 3


def dataset_of(targets: Tensor, class_names: tuple[str, ...] = ()) -> Dataset:
    part = Samples(features=torch.zeros(len(targets), 2), targets=targets)
    return Dataset(train=part, test=part, class_names=class_names)


@pytest.mark.parametrize(
    ("targets", "names", "kind", "num_outputs", "shown"),
    [
        (LABELS, ("a", "b", "c"), TargetKind.CLASS, 3, "class labels"),
        (LABELS.float(), (), TargetKind.NUMBER, 1, "real targets"),
        (LABELS, (), TargetKind.NUMBER, 1, "real targets"),
        (torch.rand(24, 5), (), TargetKind.VECTOR, 5, "vectors of 5 real targets"),
        ((torch.rand(24, 4) > 0.5).long(), tuple("wxyz"), TargetKind.LABELS, 4, "several labels per sample (4)"),
        (LABELS.reshape(4, 6), ("a", "b", "c"), TargetKind.MASK, 3, "one target per position (6)"),
        (LABELS.reshape(2, 3, 4), ("a", "b", "c"), TargetKind.MASK, 3, "one target per position (3 x 4)"),
        (torch.rand(2, 3, 4), (), TargetKind.MASK, 1, "one target per position (3 x 4)"),
    ],
)
def test_a_target_is_described_by_its_dtype_its_shape_and_the_classes(
    targets: Tensor, names: tuple[str, ...], kind: TargetKind, num_outputs: int, shown: str
) -> None:
    target = dataset_of(targets, names).target
    assert (target.kind, target.num_outputs, target.shape) == (kind, num_outputs, tuple(targets.shape[1:]))
    assert str(target) == shown
    assert target.class_names == (names if kind is TargetKind.CLASS else ())


def test_errors_of_vectors_are_taken_over_all_their_numbers() -> None:
    """Errors 3, 0, 0 and 1, 0, 2: squares 9 and 5, six numbers; the mean of a sample is 3 and 5/3."""
    outputs, targets = (
        torch.tensor([[3.0, 1.0, 1.0], [0.0, 2.0, 2.0]]),
        torch.tensor([[0.0, 1.0, 1.0], [1.0, 2.0, 0.0]]),
    )
    task = Regression()
    assert task.loss(outputs, targets).item() == pytest.approx(14 / 6)
    assert task.losses(outputs, targets).tolist() == pytest.approx([3, 5 / 3])
    assert rmse(outputs, targets) == pytest.approx((14 / 6) ** 0.5)


def positions(seed: int) -> Dataset:
    return dataset_of(LABELS.reshape(2, 3, 4).repeat(12, 1, 1), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"task=classification was given, but .* has one target per position \(3 x 4\); use a task of your own"),
        ({"task": "regression"}, "task=regression was given, but .* has one target per position"),
        ({"task": f"{__name__}:Own"}, r"metrics=\['accuracy'\] was given, but .* use a metric of your own"),
    ],
)
def test_a_target_that_a_task_or_a_metric_does_not_take_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = Workload(from_dict({"data": {"name": f"{__name__}:positions"}, **changes})).dataset


class Own:
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean()


def test_a_partition_by_class_needs_one_class_per_sample() -> None:
    for targets in (LABELS.reshape(8, 3), torch.rand(24), torch.rand(24, 1)):
        with pytest.raises(DataError, match=r"partition.name=mine needs class labels, but the targets are"):
            class_labels(dataset_of(targets).train, name="mine")


def test_masks_are_partitioned_and_counted_as_samples() -> None:
    changes: dict[str, Any] = {
        "data": {"name": f"{__name__}:positions"},
        "partition": {"name": "iid", "num_clients": 4},
        "server": {"cohort_size": 2},
        "task": f"{__name__}:Own",
        "metrics": [],
    }
    work = Workload(from_dict(changes))
    assert work.label_counts() == [[6]] * 4
    assert work.dataset.num_outputs == 3
    assert np.sort(np.concatenate([*work.partition])).tolist() == [*range(24)]
