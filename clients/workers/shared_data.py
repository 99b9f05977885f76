"""Training processes, and the memory that they share with their parent.

The training samples are in memory once, whatever the number of processes.
"""

import hashlib
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsign.config import ExperimentConfig
from fedsign.data.base import Dataset, Samples
from fedsign.data.normalize import Normalization
from fedsign.errors import DataError, EngineError
from fedsign.models.transform import sent_tensors
from fedsign.transport.connection import Message
from fedsign.transport.process import ChildProcess, close_all
from fedsign.transport.tensors import Layout, SharedFile, Slots, slot_bytes_of
from fedsign.workload import Workload


@dataclass(frozen=True, slots=True)
class VocabularyOnly:
    """A stand-in for the tokenizer in workers, which get tokens and see no text."""

    vocabulary_size: int
    start_id: int = 0
    end_id: int = 0
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        """Raises: DataError: always."""
        raise _untold()

    def decode(self, tokens: Iterable[int]) -> str:
        """Raises: DataError: always."""
        raise _untold()


def _untold() -> DataError:
    return DataError(
        "this process was given tokens without their tokenizer; encode and decode where the data was read."
    )


class TrainingProcesses:
    """Starts processes that share training samples, received models, and replies with this one."""

    def __init__(
        self,
        workload: Workload,
        module: str,
        *,
        name: str,
        logs: Path,
        clients_per_reply: int = 1,
        model: nn.Module | None = None,
    ) -> None:
        """Allocate the memory; `name` appears in the logs and in an environment variable that marks the processes.

        `model` saves making another one.

        Raises:
            EngineError: this process is such a process itself.
        """
        self._mark = f"FEDSIGN_{name.upper()}"
        if os.environ.get(self._mark):
            raise EngineError(
                f"a {name} process was made to start a run, by a module that starts one when it is imported; put that "
                'under `if __name__ == "__main__":`.'
            )
        self._workload, self._module, self._name, self._logs = workload, module, name, logs
        model = model or workload.make_model()
        sent = sent_tensors(model)
        self.model_bytes = sum(tensor.nbytes for tensor in sent.values())
        self.models = Slots("models", slot_bytes_of(sent))
        self.replies = Slots("replies", clients_per_reply * slot_bytes_of(sent))
        data = share_data(workload)
        self._files = [self.models, self.replies, *(data[:1] if data else [])]
        self._memory = {"models": self.models.as_json(), "replies": self.replies.as_json(), "data": data and data[1]}

    def share(self, name: str, tensors: Mapping[str, Tensor]) -> Message:
        """Share tensors with all processes that start from now on; the message says where they are."""
        layout = Layout.of(tensors)
        file = Slots(name, layout.num_bytes)
        layout.write(tensors, file.memory(file.take()))
        self._files.append(file)
        return {"file": file.as_json(), "layout": layout.as_json()}

    def start(
        self,
        number: int,
        *,
        device: str,
        environment: Mapping[str, str],
        **given: object,
    ) -> ChildProcess:
        """Start a process; `given` are additional settings."""
        self._logs.mkdir(parents=True, exist_ok=True)
        child = ChildProcess(
            self._module,
            log=self._logs / f"{self._name}-{number}.log",
            descriptors=[file.descriptor for file in self._files],
            environment={self._mark: "1", **environment},
        )
        child.connection.send({**described(self._workload, device=device), **self._memory, **given})
        return child

    def close(self, children: Collection[ChildProcess]) -> None:
        """End the processes, free the memory, and remove empty logs."""
        close_all(children)
        for file in self._files:
            file.close()
        for log in self._logs.glob(f"{self._name}-*.log"):
            if not log.stat().st_size:
                log.unlink()
        with suppress(OSError):  # not empty, or never created
            self._logs.rmdir()


def described(workload: Workload, *, device: str | None = None) -> Message:
    """A description from which another process can rebuild the workload, optionally on another device."""
    config, sites = workload.config, workload.sites_here
    if device is not None:
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"device": device})})
    return {"config": config.to_toml(), "sites": None if sites is None else sorted(sites)}


def workload_from(given: Message) -> Workload:
    """Rebuild a workload from its description, with shared `data` if included."""
    # The sender has validated it; validating again would import what only a server needs.
    config, sites = ExperimentConfig.model_validate(tomllib.loads(given["config"])), given["sites"]
    torch.set_num_threads(config.engine.threads)
    workload = Workload(config, None if sites is None else frozenset(sites))
    if given.get("data"):
        vars(workload)["dataset"] = mapped_data(given["data"])  # the slot of the cached_property
    return workload


def share_data(workload: Workload) -> tuple[Slots, Message] | None:
    """Move a workload's training samples into shared memory; None for samples that are fetched batch by batch.

    Returns the file, and a message for `mapped_data`.  The workload's data set is replaced by the shared one, so that
    the original's memory can be freed.
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
    shared: dict[str, Any] = layout.read(memory)
    # the slot of the cached_property
    vars(workload)["dataset"] = replace(dataset, train=Samples(**shared))
    vars(workload).pop("training_samples", None)  # derived from the original
    return file, {
        "file": file.as_json(),
        "layout": layout.as_json(),
        "class_names": dataset.class_names,
        "shift": dataset.normalization.shift,
        "scale": dataset.normalization.scale,
        "vocabulary_size": None if dataset.text is None else dataset.text.vocabulary_size,
    }


def digest_of(dataset: Dataset) -> str:
    """A digest to compare training samples between machines; fetched samples count by number and targets."""
    train = dataset.train
    tensors = [train.targets, train.owners]
    if isinstance(train, Samples):
        tensors.append(train.features)
    hasher = hashlib.blake2b(str(len(train)).encode(), digest_size=16)
    for tensor in tensors:
        if tensor is not None:
            hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())  # equal bytes may be other samples
            hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def mapped_data(header: Message) -> Dataset:
    """The shared data set of another process, without samples that only a server needs."""
    tensors: dict[str, Any] = Layout.from_json(header["layout"]).read(SharedFile(*header["file"]).memory(0))
    train = Samples(**tensors)
    size = header["vocabulary_size"]
    none = Samples(features=train.features[:0], targets=train.targets[:0])
    return Dataset(
        train=train,
        test=none,
        class_names=tuple(header["class_names"]),
        normalization=Normalization(shift=tuple(header["shift"]), scale=tuple(header["scale"])),
        text=None if size is None else VocabularyOnly(size),
    )
