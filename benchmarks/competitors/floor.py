"""The floor: only the arithmetic, to show what a faster simulator of this workload could still gain.

Chains of linear layers: a cohort is one stack of tensors, its batches are gathered before the clock starts, and
gradients are written by hand. Clients are sorted by their number of steps, so that each step uses a prefix of the
stack. Other networks: clients in sequence; forward, backward and update, channels-last on a CPU, without an optimizer
object. Both compute what the bare loop computes, from the same batches.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.competitors.stopwatch import Stopwatch, arguments
from benchmarks.task import Task

Step = tuple[
    Tensor, Tensor, Tensor
]  # features [clients, batch, width], targets [clients, batch], weights [clients, batch, 1]
_CHAIN = nn.Linear | nn.ReLU | nn.Flatten


def main() -> None:
    """Run the workload."""
    given = arguments()
    task, watch = Task(given.workload, torch.device(given.device)), Stopwatch()
    network = task.make_network()
    parts = list(network.children())
    layers = [part for part in parts if isinstance(part, nn.Linear)]
    is_chain = isinstance(network, nn.Sequential) and all(isinstance(part, _CHAIN) for part in parts)
    torch.manual_seed(task.seed)
    rounds = stacked_rounds(task, layers) if is_chain else single_rounds(task, network)
    loss = accuracy = float("nan")
    watch.mark()
    for train in rounds:
        train()
        loss, accuracy = task.evaluate(network)
        watch.mark()
    watch.write(given.out, loss=loss, accuracy=accuracy, kind="one stack" if is_chain else "one after another")


@torch.no_grad()
def stacked_rounds(task: Task, layers: list[nn.Linear]) -> list[Callable[[], None]]:
    """Return each round's training, planned in advance."""
    served = [(layer.weight, layer.bias) for layer in layers]
    plans = [_plan(task, round) for round in range(1, task.rounds + 1)]
    lr, num_clients = task.lr, task.cohort_size

    @torch.no_grad()
    def train(steps: list[Step]) -> None:
        stack = [(weight.repeat(num_clients, 1, 1), bias.repeat(num_clients, 1, 1)) for weight, bias in served]
        for features, targets, weights in steps:
            active = [(weight[: len(features)], bias[: len(features)]) for weight, bias in stack]
            inputs = [features]  # of each layer
            for position, (weight, bias) in enumerate(active):
                outputs = torch.baddbmm(bias, inputs[-1], weight.mT)
                inputs.append(outputs.relu_() if position < len(active) - 1 else outputs)
            slope = inputs.pop().softmax(2)
            slope.scatter_add_(2, targets.unsqueeze(2), torch.full_like(weights, -1.0))
            slope *= weights
            for position in range(len(active) - 1, -1, -1):
                weight, bias = active[position]
                below = torch.bmm(slope, weight) if position else None
                weight.baddbmm_(slope.mT, inputs[position], alpha=-lr)
                bias.sub_(slope.sum(1, keepdim=True), alpha=lr)
                if below is not None:
                    slope = below.mul_(inputs[position] > 0)
        for (weight, bias), (weights_, biases) in zip(served, stack, strict=True):
            torch.mean(weights_, 0, out=weight.data)
            torch.mean(biases.squeeze(1), 0, out=bias.data)

    return [lambda steps=steps: train(steps) for steps in plans]  # type: ignore[misc]


def _plan(task: Task, round: int) -> list[Step]:
    """Plan a round's batches, clients with more steps first; short batches are padded with weight 0."""
    batches = sorted((list(task.batches(round, client)) for client in task.cohort(round)), key=len, reverse=True)
    steps = []
    for number in range(len(batches[0])):
        present = [each[number] for each in batches if number < len(each)]
        longest = max(len(targets) for _, targets in present)
        features = torch.stack([_filled(each.flatten(1), longest) for each, _ in present])
        targets = torch.stack([_filled(each, longest) for _, each in present])
        sizes = torch.tensor([len(each) for _, each in present], device=targets.device)[:, None, None]
        inside = torch.arange(longest, device=targets.device)[None, :, None] < sizes
        steps.append((features, targets, inside / sizes))
    return steps


def _filled(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows[:1].expand(length - len(rows), *rows.shape[1:])])


def single_rounds(task: Task, network: nn.Module) -> Iterator[Callable[[], None]]:
    """Return each round's training, clients in sequence."""
    if task.device.type == "cpu":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters: list[Tensor] = list(network.parameters())
    state = [tensor for tensor in network.state_dict().values() if tensor.is_floating_point()]

    def train(batches: list[list[Any]]) -> None:
        served = [tensor.clone() for tensor in state]
        total = [torch.zeros_like(tensor) for tensor in state]
        for own in batches:
            torch._foreach_copy_(state, served)
            network.train()
            for features, targets in own:
                loss = functional.cross_entropy(network(features), targets)
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-task.lr)
            torch._foreach_add_(total, state)
        torch._foreach_div_(total, float(len(batches)))
        torch._foreach_copy_(state, total)

    for round in range(1, task.rounds + 1):
        batches = [list(task.batches(round, client)) for client in task.cohort(round)]
        yield lambda batches=batches: train(batches)  # type: ignore[misc]


if __name__ == "__main__":
    main()
