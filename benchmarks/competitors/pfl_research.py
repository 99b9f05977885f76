"""pfl-research 0.6: FederatedAveraging on a PyTorchModel in a SimulatedBackend, central evaluation by its own callback.

A user's id is (round, client), so that clients and batches of every round are the workload's own.  Clients have equal
weights: statistics of weight 1, without a postprocessor.  Several processes are started as pfl documents, by
PFL_WORKER_RANK and PFL_WORKER_ADDRESSES, and reduced by torch's gloo.  With `balanced`, users are distributed by size,
which takes two more processes and a queue.
"""

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.competitors.stopwatch import Stopwatch, arguments
from benchmarks.task import Task

_RANK, _ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


def main() -> None:
    """Run the workload, in the requested number of processes."""
    given = arguments()
    os.environ["PFL_PYTORCH_DEVICE"] = given.device
    processes = given.settings.get("processes", 1)
    if processes == 1 or _RANK in os.environ:
        run_workload(given, watch=Stopwatch())
        return
    port = _free_port()
    addresses = ",".join(f"localhost:{port + rank}" for rank in range(processes))
    others = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, *sys.argv[1:]],
            env={**os.environ, _ADDRESSES: addresses, _RANK: str(rank)},
        )
        for rank in range(processes)
    ]
    codes = [each.wait() for each in others]
    sys.exit(max(codes, key=abs))


def run_workload(given: Any, *, watch: Stopwatch) -> None:
    """Run the workload in this process, one of possibly several."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops import get_ops
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    task = Task(given.workload, torch.device(given.device))

    class Net(nn.Module):
        """The interface that pfl expects of a network: `loss` and `metrics`."""

        def __init__(self) -> None:
            super().__init__()
            self.net = task.make_network()

        def loss(self, features: Tensor, targets: Tensor) -> Tensor:
            self.train()
            return functional.cross_entropy(self.net(features), targets)

        @torch.no_grad()
        def metrics(self, features: Tensor, targets: Tensor) -> dict[str, Any]:
            self.eval()
            outputs, size = self.net(features), len(targets)
            loss = functional.cross_entropy(outputs, targets, reduction="sum").item()
            right = (outputs.argmax(1) == targets).sum().item()
            return {"loss": Weighted(loss, size), "accuracy": Weighted(right, size)}

    def users() -> Iterator[tuple[int, int]]:
        for round in itertools.cycle(range(1, task.rounds + 1)):
            yield from ((round, client) for client in task.cohort(round))

    def make_dataset(user: tuple[int, int]) -> Any:
        round, client = user
        features, targets = task.clients[client] if task.num_clients <= 10_000 else task.client(client)
        (order,) = task.order(round, client)  # pfl repeats an order in all epochs; the workloads have one
        return Dataset((features[order], targets[order]), user_id=str(client))

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        """The last callback: a round has ended."""

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            watch.mark()
            return False, Metrics()

        def on_train_begin(self, *, model: Any) -> Any:
            watch.mark()
            return Metrics()

    torch.manual_seed(task.seed)
    network = Net()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    task.clients if task.num_clients <= 10_000 else task.train  # noqa: B018 - cached before the clock starts
    weights = None
    if given.settings.get("balanced"):  # pfl's scheduling of users by size
        chosen = [(round, client) for round in range(1, task.rounds + 1) for client in task.cohort(round)]
        weights = {user: len(task.members(user[1])) for user in chosen}
    data = FederatedDataset(make_dataset, users().__next__, user_id_to_weight=weights)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):  # pfl prints all metrics
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=task.rounds,
                evaluation_frequency=10**9,
                train_cohort_size=task.cohort_size,
                val_cohort_size=None,
            ),
            SimulatedBackend(data, data),
            model,
            NNTrainHyperParams(
                local_batch_size=task.batch_size, local_num_epochs=task.epochs, local_learning_rate=task.lr
            ),
            NNEvalHyperParams(local_batch_size=1024),
            callbacks=[
                CentralEvaluationCallback(Dataset(task.test), NNEvalHyperParams(local_batch_size=1024)),
                Clock(),
            ],
        )
    if get_ops().distributed.global_rank == 0:
        loss, accuracy = task.evaluate(network.net)
        watch.write(
            given.out, loss=loss, accuracy=accuracy, packages=("pfl",), processes=get_ops().distributed.world_size
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
