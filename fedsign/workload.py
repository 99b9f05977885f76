"""What server and clients both derive from the configuration: data, partition, model, task.

Every process builds its own from the same configuration and seed; nothing of it travels.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from fedsign import plugins
from fedsign.config import ExperimentConfig, from_toml
from fedsign.data.base import Dataset, IntArray, Samples
from fedsign.errors import ConfigError, DataError
from fedsign.registry import resolve
from fedsign.seeding import Purpose, generator, torch_stream
from fedsign.tasks.base import Task

_EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class Workload:
    """Data, partition, model and task of an experiment, each made on first use."""

    config: ExperimentConfig

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, whole.

        Raises:
            DataError: what the factory gives cannot be trained on.
        """
        return checked_dataset(self.config.data.build(self.config.seed), name=self.config.data.name)

    @cached_property
    def partition(self) -> list[IntArray]:
        """Indices into the training samples, one array per client."""
        part = self.config.partition
        rng = generator(self.config.seed, Purpose.PARTITION)
        indices: list[IntArray] = part.build(self.dataset.train, part.num_clients, rng)
        check_partition(indices, num_clients=part.num_clients, num_samples=len(self.dataset.train), name=part.name)
        return indices

    @cached_property
    def task(self) -> Task:
        """The loss."""
        task: Task = plugins.build("task", self.config.task, {})
        return task

    @cached_property
    def device(self) -> torch.device:
        """Where training and evaluation happen."""
        return device_of(self.config.engine.device)

    def samples_of(self, partition: int) -> Samples:
        """One client's training samples."""
        return self.dataset.train[self.partition[partition]]

    def make_model(self) -> nn.Module:
        """A new model with the experiment's initial parameters, the same in every process."""
        with torch_stream(self.config.seed, Purpose.MODEL):
            model: nn.Module = self.config.model.build(self.dataset.input_shape, self.dataset.num_outputs)
        return model.to(self.device)

    def label_counts(self) -> list[list[int]]:
        """How many samples of each class each client holds, [clients][classes]; sizes for a regression."""
        if not self.dataset.class_names:
            return [[len(index)] for index in self.partition]
        labels = self.dataset.train.targets.numpy()
        num_classes = len(self.dataset.class_names)
        return [np.bincount(labels[index], minlength=num_classes).tolist() for index in self.partition]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and metrics of a model on the server's test samples."""
        model.eval()
        test = self.dataset.test
        with torch.no_grad():
            batches = [model(batch.to(self.device)).cpu() for batch in test.features.split(_EVALUATION_BATCH)]
            outputs: Tensor = torch.cat(batches)
            values = {"loss": self.task.loss(outputs, test.targets).item()}
        for name in self.config.metrics:
            values[name.rpartition(":")[2]] = float(resolve("metric", name)(outputs, test.targets))
        return values


@lru_cache(maxsize=2)
def workload_of(config_toml: str) -> Workload:
    """The workload of an experiment that came as text; kept, because a process serves many messages."""
    return Workload(from_toml(config_toml))


def checked_dataset(dataset: object, *, name: str) -> Dataset:
    """A factory's answer, if it is a data set that can be trained on."""
    if not isinstance(dataset, Dataset):
        raise DataError(f"data.name={name} gives a {type(dataset).__name__}; expected is a fedsign.data.base.Dataset.")
    for which, samples in (("training", dataset.train), ("test", dataset.test)):
        if not len(samples) or len(samples.features) != len(samples.targets):
            raise DataError(
                f"data.name={name} gives {len(samples.features)} {which} features and {len(samples)} targets; expected is "
                "one target for each, and at least one."
            )
        if not samples.features.is_floating_point():
            raise DataError(
                f"data.name={name} gives {which} features of {samples.features.dtype}; expected is float32."
            )
        if dataset.class_names and not _are_labels(samples.targets, len(dataset.class_names)):
            raise DataError(
                f"data.name={name} gives {which} targets that are not integers from 0 to {len(dataset.class_names) - 1}, "
                "the positions in class_names; correct them, or leave class_names empty for a regression."
            )
    return dataset


def check_partition(indices: list[IntArray], *, num_clients: int, num_samples: int, name: str) -> None:
    """Raise DataError unless every client has samples, and no sample has two clients."""
    if len(indices) != num_clients or any(len(index) == 0 for index in indices):
        raise DataError(
            f"partition.name={name} gives {len(indices)} parts, {sum(len(index) == 0 for index in indices)} of them empty; "
            f"expected are {num_clients} with at least one sample each."
        )
    dealt = np.concatenate(indices)
    if len(np.unique(dealt)) != len(dealt) or dealt.min() < 0 or dealt.max() >= num_samples:
        raise DataError(
            f"partition.name={name} deals a sample out twice or one that does not exist; expected are different indices "
            f"from 0 to {num_samples - 1}."
        )


def _are_labels(targets: Tensor, num_classes: int) -> bool:
    return not targets.is_floating_point() and int(targets.min()) >= 0 and int(targets.max()) < num_classes


def device_of(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:i` as a device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device='{name}' was given; expected is auto, cpu, cuda or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device='{name}' was given, but torch sees no CUDA device here; use cpu or auto.")
    return device
