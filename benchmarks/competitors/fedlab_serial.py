"""FedLab 1.3: StandalonePipeline with SGDSerialClientTrainer and SyncServerHandler, evaluation after each round.

Its trainer takes batches from any loader of a FedDataset. Ours yields precut tensors, because a DataLoader that
collates sample by sample would be several times slower.  FedLab sends and averages parameters, but no buffers.
"""

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.competitors.stopwatch import Stopwatch, arguments
from benchmarks.task import Task


def main() -> None:
    """Run the workload."""
    given = arguments()
    _make_torchvision_importable()
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.contrib.dataset.basic_dataset import FedDataset
    from fedlab.core.standalone import StandalonePipeline

    logging.disable(logging.INFO)
    task, watch = Task(given.workload, torch.device(given.device)), Stopwatch()
    cuda = task.device.type == "cuda"

    class Handler(SyncServerHandler):  # type: ignore[misc]
        def sample_clients(self) -> list[int]:
            return task.cohort(self.round + 1)

    class Loaders(FedDataset):  # type: ignore[misc]
        def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Iterator[tuple[Tensor, Tensor]]:
            return task.batches(handler.round + 1, id)

    class Pipeline(StandalonePipeline):  # type: ignore[misc]
        def evaluate(self) -> None:
            self.loss, self.accuracy = task.evaluate(self.handler.model)
            watch.mark()

    ratio = min(1.0, task.cohort_size / task.num_clients + 1e-9)  # FedLab rounds down
    handler: Any = Handler(task.make_network(), task.rounds, ratio, cuda=cuda)
    trainer: Any = SGDSerialClientTrainer(task.make_network(), task.num_clients, cuda=cuda)
    trainer.setup_dataset(Loaders())
    trainer.setup_optim(1, task.batch_size, task.lr)  # the loader yields all epochs
    task.clients if task.num_clients <= 10_000 else task.train  # noqa: B018 - cached before the clock starts
    torch.manual_seed(task.seed)
    pipeline: Any = Pipeline(handler, trainer)
    watch.mark()
    pipeline.main()
    watch.write(given.out, loss=pipeline.loss, accuracy=pipeline.accuracy, packages=("fedlab",))


def _make_torchvision_importable() -> None:
    """Register the schemas of two operators that torchvision, imported by FedLab, misses beside a CPU-only torch."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEEP_ALIVE.append(library)


_KEEP_ALIVE: list[Any] = []


if __name__ == "__main__":
    main()
