"""The loop that everybody writes first: copy the model, train each client, add up, evaluate.

No records, no checks, no disk. It uses one working model and creates only the optimizer anew. It is the baseline of
ratios.
"""

import torch
from torch.nn import functional

from benchmarks.competitors.stopwatch import Stopwatch, arguments
from benchmarks.task import Task


def main() -> None:
    """Run the workload."""
    given = arguments()
    task, watch = Task(given.workload, torch.device(given.device)), Stopwatch()
    network = task.make_network()
    served = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    task.clients if task.num_clients <= 10_000 else task.train  # noqa: B018 - cached before the clock starts
    torch.manual_seed(task.seed)
    loss = accuracy = float("nan")
    watch.mark()
    for round in range(1, task.rounds + 1):
        cohort = task.cohort(round)
        total = {name: torch.zeros_like(tensor) for name, tensor in served.items() if tensor.is_floating_point()}
        for client in cohort:
            network.load_state_dict(served)
            network.train()
            optimizer = torch.optim.SGD(network.parameters(), lr=task.lr)
            for features, targets in task.batches(round, client):
                optimizer.zero_grad()
                functional.cross_entropy(network(features), targets).backward()
                optimizer.step()
            state = network.state_dict()
            for name, sum_ in total.items():
                sum_ += state[name]
        served = {**served, **{name: tensor / len(cohort) for name, tensor in total.items()}}
        network.load_state_dict(served)
        loss, accuracy = task.evaluate(network)
        watch.mark()
    watch.write(given.out, loss=loss, accuracy=accuracy)


if __name__ == "__main__":
    main()
