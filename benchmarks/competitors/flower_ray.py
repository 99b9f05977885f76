"""Flower 1.41: FedAvg of its message API by `run_simulation` on Ray, evaluation by the ServerApp after each round.

Each actor has one core and one thread, and keeps its data and network.  Flower's node ids are random, so the server's
messages say which client a node is; clients and batches of a round are thus the workload's own.  Clients have equal
weights.
"""

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional

from benchmarks.competitors.stopwatch import Stopwatch, arguments
from benchmarks.task import Task


class FixedCohorts(FedAvg):
    """FedAvg that selects one node per client of the round, and tells each which client it is."""

    def __init__(self, task: Task) -> None:
        super().__init__(fraction_train=task.cohort_size / task.num_clients, fraction_evaluate=0.0)
        self._task = task

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        """Send one message per client of the round."""
        nodes = sorted(grid.get_node_ids())
        common = {
            **config,
            "server-round": server_round,
            "workload": str(self._task.folder),
            "device": str(self._task.device),
        }
        return [
            Message(
                RecordDict({"arrays": arrays, "config": ConfigRecord({**common, "client": client})}),
                nodes[client % len(nodes)],
                MessageType.TRAIN,
            )
            for client in self._task.cohort(server_round)
        ]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Aggregate as FedAvg does; a failed client ends the run, since its work is missing."""
        received = list(replies)
        failed = [message.error.reason for message in received if message.has_error()]
        if failed or len(received) < self._task.cohort_size:
            raise RuntimeError(f"round {server_round}: {len(received)} replies, errors: {failed[:1]}")
        return super().aggregate_train(server_round, received)


@lru_cache(maxsize=1)
def actors_own(folder: str, device: str) -> tuple[Task, Any]:
    """Create an actor's data and network, once."""
    torch.set_num_threads(1)
    task = Task(Path(folder), torch.device(device))
    return task, task.make_network()


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train a client's round."""
    content: Any = message.content
    config = content["config"]
    task, network = actors_own(config["workload"], config["device"])
    network.load_state_dict(content["arrays"].to_torch_state_dict())
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=task.lr)
    for features, targets in task.batches(config["server-round"], config["client"]):
        optimizer.zero_grad()
        functional.cross_entropy(network(features), targets).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)


def main() -> None:
    """Run the workload."""
    given = arguments()
    task, watch = Task(given.workload, torch.device(given.device)), Stopwatch()
    network, found = task.make_network(), {}
    actors = given.settings.get("actors", 2)
    server_app = ServerApp()

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        network.load_state_dict(arrays.to_torch_state_dict())
        found["loss"], found["accuracy"] = task.evaluate(network)
        watch.mark()
        return MetricRecord(dict(found))

    @server_app.main()
    def server(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(network.state_dict())
        FixedCohorts(task).start(grid, arrays, num_rounds=task.rounds, evaluate_fn=evaluate)

    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    run_simulation(
        server_app,
        client_app,
        num_supernodes=task.num_clients,
        backend_config={
            "init_args": {"num_cpus": actors, "num_gpus": torch.cuda.device_count(), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 1 / actors if task.device.type == "cuda" else 0.0},
        },
    )
    watch.write(given.out, loss=found["loss"], accuracy=found["accuracy"], packages=("flwr", "ray"))


if __name__ == "__main__":
    from benchmarks.competitors import flower_ray  # imported by name, since Ray's actors unpickle by module name

    flower_ray.main()
