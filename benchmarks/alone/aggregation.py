"""Aggregate ten replies of 100 MB each: the server's part of a round with a large model.

Compared in turn: a plain in-place sum (the lower bound), ours, and the helper of Flower's strategies.  Then the peak
memory of ours and Flower's beyond one reply, for growing numbers of replies that arrive one after another.
"""

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.measure import dispersion, result_head, write_result

NAME = "aggregation"
NUM_REPLIES = 10
NUM_TENSORS, ELEMENTS = 25, 1_048_576  # 105 MB of float32
MB = NUM_TENSORS * ELEMENTS * 4 / 1e6
REPLIES_IN_MEMORY = (2, 8, 32)

Model = dict[str, torch.Tensor]


def reply(seed: int) -> Model:
    """Make a model of `NUM_TENSORS` tensors."""
    drawn = torch.Generator().manual_seed(seed)
    return {f"layer{index}": torch.randn(ELEMENTS, generator=drawn) for index in range(NUM_TENSORS)}


def in_place_sum(replies: list[Model]) -> Model:
    """Copy the first reply, add the others, divide."""
    total = {name: tensor.clone() for name, tensor in replies[0].items()}
    for other in replies[1:]:
        for name, tensor in total.items():
            tensor.add_(other[name])
    for tensor in total.values():
        tensor.div_(len(replies))
    return total


def ours(replies: Iterator[Model] | list[Model]) -> Model:
    """Average with unequal weights."""
    from fedsign.federation.aggregation import WeightedMean

    mean = WeightedMean()
    for index, model in enumerate(replies):
        mean.add(model, 1.0 + index)
    return mean.result()


def flower(records: list[Any]) -> Any:
    """Call what Flower's FedAvg calls."""
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    return aggregate_arrayrecords(records, "num-examples")


def records_of(replies: Iterator[Model] | list[Model]) -> list[Any]:
    """Convert the replies to Flower's records."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict

    return [
        RecordDict({"arrays": ArrayRecord(model), "metrics": MetricRecord({"num-examples": 1.0 + index})})
        for index, model in enumerate(replies)
    ]


def measure(path: Path, *, repetitions: int) -> None:
    """Time all of them in turn, after a warm-up turn."""
    before = machine()
    torch.set_num_threads(1)
    replies = [reply(seed) for seed in range(NUM_REPLIES)]
    records = records_of(replies)
    competitors: dict[str, Callable[[], object]] = {
        "in_place_sum": lambda: in_place_sum(replies),
        "ours": lambda: ours(replies),
        "flower": lambda: flower(records),
    }
    _check(replies, records)
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for repetition in range(repetitions + 1):
        for name, call in competitors.items():
            began = time.perf_counter()
            made = call()
            took = time.perf_counter() - began
            del made
            if repetition:
                seconds[name].append(took)
    ratios = {
        name: [one / floor for one, floor in zip(taken, seconds["in_place_sum"], strict=True)]
        for name, taken in seconds.items()
    }
    write_result(
        path,
        {
            **result_head(NAME, "Aggregation: ten replies of 100 MB", before, repetitions),
            "mb": MB,
            "num_replies": NUM_REPLIES,
            "seconds": {name: dispersion(taken) for name, taken in seconds.items()},
            "ratio_to_in_place_sum": {name: dispersion(found) for name, found in ratios.items()},
            "peak_mb": {name: _peaks(name) for name in ("ours", "flower")},
        },
    )
    for name in competitors:
        print(
            f"{NAME}: {name:14} {1000 * dispersion(seconds[name])['median']:7.1f} ms, "
            f"{dispersion(ratios[name])['median']:.2f} x"
        )


def _check(replies: list[Model], records: list[Any]) -> None:
    """Check that both compute the weighted mean."""
    weights = torch.arange(1.0, len(replies) + 1)
    found, theirs = ours(replies)["layer0"], torch.from_numpy(flower(records)["layer0"].numpy())
    expected = torch.tensordot(weights, torch.stack([model["layer0"] for model in replies]), dims=1) / weights.sum()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs, expected, rtol=1e-5, atol=1e-6)


def _peaks(name: str) -> dict[str, float]:
    """Measure peak memory beyond the imports in MB, by number of replies; each in a separate process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["benchmarks.alone.aggregation", "fedsign.federation.aggregation", "flwr.serverapp.strategy"]
    )
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        return {str(num): processes.submit(_peak_mb, name, num).result() for num in REPLIES_IN_MEMORY}


def _peak_mb(name: str, num_replies: int) -> float:
    """Measure one peak. Replies are created on demand, as if they came from a network one after another."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arriving = (reply(seed) for seed in range(num_replies))
    if name == "ours":
        ours(arriving)
    else:
        flower(records_of(arriving))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6


if __name__ == "__main__":
    measure(Path(__file__).parents[1] / "results" / f"{NAME}.json", repetitions=5)
