"""The cohort path against its specification for layers that mix samples, draw numbers, or convolve.

The same comparison as in `test_cohort`, with BatchNorm, dropout, augmentation and ResNet-20.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clients.cohort.rules import COHORT
from clients.cohort.trainer import CohortTrainer
from clients.trainer import SequentialTrainer
from fedsign.compatibility import Experiment
from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.data.partition.base import Split
from fedsign.records import ObjectiveSpec, Role
from fedsign.workload import Workload
from tests.cohort.test_cohort import (
    DTYPES,
    OBJECTIVES,
    OPTIMIZERS,
    OfType,
    assert_close,
    both_paths,
    requests,
    trained,
)

HERE = __name__
SIZES = (1, 5, 8, 9, 13)  # with batches of 8: a client of one sample, last batches of 1 (8 + 1) and of 5


def images(dtype: torch.dtype) -> Dataset:
    """Colored noise with the class as its mean."""
    random, num = torch.Generator().manual_seed(0), sum(SIZES)
    targets = torch.randint(4, (num,), generator=random)
    features = torch.randn(num, 2, 8, 8, generator=random).double() + targets.view(-1, 1, 1, 1) / 4
    samples = Samples(features=features.to(dtype), targets=targets)
    return Dataset(train=samples, test=samples, class_names=("a", "b", "c", "d"))


class Parts(OfType):
    """Clients of the sizes above."""

    @cached_property
    def split(self) -> Split:
        return Split(indices=np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))


def image_workload(dtype: torch.dtype, model: Mapping[str, Any], **client: Any) -> Workload:
    augment = client.pop("augment", "none")
    config = from_dict(
        {
            "data": {"name": f"{HERE}:images"},
            "partition": {"num_clients": len(SIZES)},
            "server": {"cohort_size": len(SIZES)},
            "model": dict(model),
            "client": {"local_epochs": 2, "batch_size": 8, "lr": 0.05, **client},
        }
    )
    config = config.model_copy(update={"data": config.data.model_copy(update={"augment": augment})})
    work = Parts(config)
    work.__dict__.update(dataset=images(dtype), dtype=dtype)
    return work


class Tower(nn.Module):
    """Dropout of three kinds: on pixels, on whole channels, and after the hidden layer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.pixels, self.channels, self.hidden = nn.Dropout(0.3), nn.Dropout2d(0.4), nn.Dropout(0.5, inplace=True)
        self.first, self.classifier = nn.Linear(96, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(torch.relu(self.conv(self.pixels(x))))
        return self.classifier(torch.tanh(self.hidden(self.first(nn.functional.max_pool2d(x, 2).flatten(1)))))


class Running(nn.Module):
    """BatchNorm of two kinds: a mean over all batches, and one without weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, momentum=None)
        self.plain = nn.BatchNorm1d(12, affine=False, momentum=0.3)
        self.first, self.classifier = nn.Linear(128, 12), nn.Linear(12, 4)
        self.register_buffer("scale", torch.tensor(2.0))  # a buffer that nothing changes

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.plain(self.first(torch.relu(self.norm(x)).flatten(1)))
        return self.classifier(torch.relu(self.scale * hidden))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(144, 8),
            nn.Tanh(),
        )
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x))


def tower(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Tower()


def running(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Running()


def norm_and_dropout(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return Both()


def mlp_dropout(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, num_outputs)
    )


MODELS: dict[str, dict[str, Any]] = {
    "niid-like cnn": {"name": "mcmahan_cnn", "channels": [3, 5], "hidden": 12},
    "cnn with batch norm": {"name": "cnn", "channels": [4, 6]},
    "cnn with dropout": {"name": f"{HERE}:tower"},
    "mlp with dropout": {"name": f"{HERE}:mlp_dropout"},
    "batch norm of two kinds": {"name": f"{HERE}:running"},
    "batch norm and dropout": {"name": f"{HERE}:norm_and_dropout"},
}
# Every model with every objective in float64, with every optimizer for two objectives, and in float32 for one.
TABLE = [
    (dtype, objective, optimizer, model)
    for dtype in DTYPES
    for objective in OBJECTIVES
    for optimizer in OPTIMIZERS
    for model in MODELS
    if (optimizer == "momentum" and (dtype == "float64" or objective == "plain"))
    or (dtype == "float64" and objective in ("plain", "moon"))
]


@pytest.mark.parametrize(("dtype", "objective", "optimizer", "model"), TABLE)
def test_a_stack_gives_what_one_client_after_another_gives(
    dtype: str, objective: str, optimizer: str, model: str, tmp_path: Path
) -> None:
    """A bias before BatchNorm has no gradient but rounding, 1e-16 and less, which Adam divides by eps = 1e-8."""
    type_, tolerance = DTYPES[dtype]
    if "adam" in optimizer and "norm" in model:
        tolerance = max(tolerance, 1e-8)
    work = image_workload(type_, MODELS[model], **OPTIMIZERS[optimizer])
    both_paths(work, OBJECTIVES[objective], tmp_path, tolerance)


@pytest.mark.needs("images")
@pytest.mark.parametrize("objective", ["plain", "feddyn"])
def test_resnet20_gives_what_one_client_after_another_gives(objective: str, tmp_path: Path) -> None:
    work = image_workload(torch.float64, {"name": "resnet20"}, local_epochs=1)
    both_paths(work, OBJECTIVES[objective], tmp_path, 1e-10)


@pytest.mark.needs("images")
def test_in_float32_a_stack_of_resnet20_lies_as_near_the_exact_result_as_the_sequential_path(tmp_path: Path) -> None:
    """Twenty layers of BatchNorm over small batches make rounding grow, on either path; float64 stands for exact."""
    models = {}
    for name, dtype in (("exact", torch.float64), ("sequential", torch.float32), ("cohort", torch.float32)):
        work = image_workload(dtype, {"name": "resnet20"}, local_epochs=1)
        trainer = CohortTrainer(work, chunk=3) if name == "cohort" else SequentialTrainer(work)
        replies = trained(trainer, requests(work, ObjectiveSpec()), tmp_path / name)
        models[name] = {
            partition: torch.cat([tensor.double().flatten() for tensor in reply.tensors.values()])
            for partition, reply in replies.items()
        }
    for partition, exact in models["exact"].items():
        rounding = (models["sequential"][partition] - exact).norm()
        assert 0 < rounding < 0.05 * exact.norm()
        assert (models["cohort"][partition] - exact).norm() < 5 * rounding


@pytest.mark.parametrize("augment", ["flip", "crop_flip"])
@pytest.mark.parametrize("model", ["niid-like cnn", "cnn with dropout", "batch norm and dropout"])
def test_augmentation_draws_what_each_clients_own_training_draws(model: str, augment: str, tmp_path: Path) -> None:
    work = image_workload(torch.float64, MODELS[model], augment=augment)
    found = both_paths(work, ObjectiveSpec(), tmp_path / "with", 1e-10)
    plain = both_paths(image_workload(torch.float64, MODELS[model]), ObjectiveSpec(), tmp_path / "without", 1e-10)
    name = next(iter(found[4].tensors))
    assert (found[4].tensors[name] - plain[4].tensors[name]).norm() > 1e-4 * plain[4].tensors[name].norm()


def test_torchs_own_generator_is_left_where_it_was(tmp_path: Path) -> None:
    work = image_workload(torch.float64, MODELS["cnn with dropout"], augment="flip")
    torch.manual_seed(5)
    trained(CohortTrainer(work, chunk=3), requests(work, ObjectiveSpec()), tmp_path)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("model", ["cnn with batch norm", "batch norm of two kinds"])
def test_batches_of_one_leave_the_statistics_alone_and_are_stacked_by_themselves(model: str, tmp_path: Path) -> None:
    """The client of one sample beside others, and everybody with batches of one."""
    for batch_size in (8, 1):
        work = image_workload(torch.float64, MODELS[model], batch_size=batch_size)
        found = both_paths(work, ObjectiveSpec(), tmp_path / str(batch_size), 1e-10, chunk=len(SIZES))
        start = requests(work, ObjectiveSpec())[0].tensors
        counters = [name for name, role in found[0].roles.items() if role is Role.BUFFER and name.endswith("tracked")]
        assert counters
        for partition, reply in found.items():
            steps = [int(reply.tensors[name]) for name in counters]
            is_frozen = batch_size == 1 or SIZES[partition] == 1
            assert (steps == [int(start[name]) for name in counters]) == is_frozen  # or the first round has moved them


@pytest.mark.parametrize("model", MODELS)
def test_results_do_not_depend_on_the_chunk(model: str, tmp_path: Path) -> None:
    work = image_workload(torch.float64, MODELS[model])
    asked = requests(work, ObjectiveSpec())
    one, *others = [trained(CohortTrainer(work, chunk=chunk), asked, tmp_path / str(chunk)) for chunk in (1, 3, 5)]
    for other in others:
        for partition, reply in one.items():
            assert_close(other[partition].tensors, reply.tensors, 1e-12)


def test_a_neighbors_samples_do_not_reach_the_statistics(tmp_path: Path) -> None:
    """They may be anything."""
    work = image_workload(torch.float64, MODELS["cnn with batch norm"])
    asked = requests(work, ObjectiveSpec())
    before = trained(CohortTrainer(work, chunk=5), asked, tmp_path)
    work = image_workload(torch.float64, MODELS["cnn with batch norm"])
    train = work.dataset.train
    assert isinstance(train, Samples)
    features = train.features.clone()
    features[work.partition[3]] = float("nan")
    work.__dict__["dataset"] = replace(work.dataset, train=replace(train, features=features))
    after = trained(CohortTrainer(work, chunk=5), asked, tmp_path)
    for partition in (0, 1, 2, 4):
        assert_close(after[partition].tensors, before[partition].tensors, 1e-14)
    assert not torch.isfinite(after[3].tensors["0.weight"]).any()


@pytest.mark.parametrize("model", MODELS)
def test_none_of_them_is_refused(model: str) -> None:
    for objective in OBJECTIVES.values():
        assert not COHORT.why_not(Experiment(workload=image_workload(torch.float32, MODELS[model]), spec=objective))
