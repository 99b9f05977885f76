"""The training samples once in memory, however many processes train on them."""

import hashlib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedsign.config import ExperimentConfig
from fedsign.data.base import Dataset, Samples
from fedsign.data.normalise import Normalisation
from fedsign.errors import DataError
from fedsign.transport.connection import Message
from fedsign.transport.tensors import Layout, SharedFile, Slots
from fedsign.workload import Workload


@dataclass(frozen=True, slots=True)
class VocabularyOnly:
    """What a worker knows of the tokenizer: it is given tokens and sees no text."""

    vocabulary_size: int
    start_id: int = 0
    end_id: int = 0
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        """Raise DataError."""
        raise _untold()

    def decode(self, tokens: Iterable[int]) -> str:
        """Raise DataError."""
        raise _untold()


def _untold() -> DataError:
    return DataError(
        "this process was given tokens without their tokenizer; encode and decode where the data was read."
    )


@dataclass(frozen=True, slots=True)
class SharedData:
    """Where the samples lie, and what else a process has to know of the data set."""

    file: Slots
    layout: Layout
    dataset: Dataset

    def as_json(self) -> dict[str, Any]:
        """For `mapped_data`."""
        normalisation = self.dataset.normalisation
        return {
            "file": [self.file.descriptor, self.file.slot_bytes],
            "layout": self.layout.as_json(),
            "class_names": self.dataset.class_names,
            "shift": normalisation.shift,
            "scale": normalisation.scale,
            "vocabulary_size": None if self.dataset.text is None else self.dataset.text.vocabulary_size,
        }


def described(workload: Workload, *, device: str | None = None) -> Message:
    """What another process has to know to make the same workload, on another device if one is given."""
    config, sites = workload.config, workload.sites_here
    if device is not None:
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"device": device})})
    return {"config": config.to_toml(), "sites": None if sites is None else sorted(sites)}


def workload_from(given: Message) -> Workload:
    """The workload that another process of this machine has `described`, with its `data`."""
    # complete and checked by who sent it; to check it again would import what only a server needs
    config, sites = ExperimentConfig.model_validate(tomllib.loads(given["config"])), given["sites"]
    torch.set_num_threads(config.engine.threads)
    workload = Workload(config, None if sites is None else frozenset(sites))
    if given["data"] is not None:
        vars(workload)["dataset"] = mapped_data(given["data"])  # where cached_property keeps it
    return workload


def share_data(workload: Workload) -> SharedData | None:
    """Move a workload's training samples into shared memory; None for samples that are fetched batch by batch.

    The workload's data set is exchanged for one that lies there, so that the memory of the former can be used again.
    """
    dataset = workload.dataset
    train = dataset.train
    if not isinstance(train, Samples):
        return None
    tensors = {"features": train.features, "targets": train.targets}
    if train.owners is not None:
        tensors["owners"] = train.owners
    layout = Layout.of(tensors)
    file = Slots("data", layout.num_bytes)
    memory = file.memory(file.take())
    layout.write(tensors, memory)
    there = replace(dataset, train=Samples(**layout.read(memory)))
    vars(workload)["dataset"] = there  # where cached_property keeps it
    vars(workload).pop("training_samples", None)  # those of the former one
    return SharedData(file, layout, there)


def digest_of(dataset: Dataset) -> str:
    """What tells whether two machines have the same training samples; of samples that are fetched, their number and targets."""
    train = dataset.train
    tensors = [train.targets, train.owners]
    if isinstance(train, Samples):
        tensors.append(train.features)
    found = hashlib.blake2b(str(len(train)).encode(), digest_size=16)
    for tensor in tensors:
        if tensor is not None:
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def mapped_data(found: dict[str, Any]) -> Dataset:
    """The data set of another process, without the samples that only a server needs."""
    tensors = Layout.from_json(found["layout"]).read(SharedFile(*found["file"]).memory(0))
    train = Samples(**tensors)
    size = found["vocabulary_size"]
    none = Samples(features=train.features[:0], targets=train.targets[:0])
    return Dataset(
        train=train,
        test=none,
        class_names=tuple(found["class_names"]),
        normalisation=Normalisation(shift=tuple(found["shift"]), scale=tuple(found["scale"])),
        text=None if size is None else VocabularyOnly(size),
    )
