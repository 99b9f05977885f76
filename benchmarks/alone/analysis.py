"""The cost of analyses: valleys against the forward passes they need, and runs with and without sign recording.

- The valley of the default MLP: 2 directions x 3 scales x 41 points on all test samples of digits; baseline: a plain
    loop.
- A curve of 41 points of ResNet-20 on 2,000 images of 32x32, with BatchNorm statistics recomputed on 500 at every
    point; baseline: the same passes of one model.
- `results.signs` on W1 (cohort path) and on W2 (sequential), on and off in turn.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.measure import dispersion, result_head, write_result
from benchmarks.workloads.w1 import W1
from benchmarks.workloads.w2 import W2
from fedsign.config import from_dict, merged
from fedsign.data.base import Samples
from fedsign.landscape.directions import Scaling, noise, scaled, with_signs
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.valley import curves, lambdas_of
from fedsign.models.channels_last import laid_out, prepare
from fedsign.models.resnet import resnet20
from fedsign.storage.results import Record
from fedsign.tasks.classification import Classification
from fedsign.workload import Workload
from simulations import run
from simulations.callbacks.base import Callback

NAME = "analysis"
SCALES = (0.2, 1.0, 2.0)
IMAGES, STATISTICS, BATCH = 2000, 500, 100
ROUNDS = {"w1": 40, "w2": 3}


def directions_of(landscape: Landscape, num: int) -> list[Tensor]:
    """Draw Gaussian noise with the model's signs."""
    layout, theta = landscape.layout, landscape.center
    return [
        scaled(layout, with_signs(noise("gaussian", layout.size, seed=0, index=draw), theta), theta, Scaling.NORM)
        for draw in range(num)
    ]


def mlp_valley() -> dict[str, Callable[[], object]]:
    """Time our valley, and a loop over the points."""
    workload = Workload(from_dict({}))
    model, test = workload.make_model().eval(), workload.dataset.test
    features, targets = test.batch(torch.arange(len(test)))
    samples = Samples(features=features, targets=targets)
    plain = copy.deepcopy(model)

    def ours() -> object:
        landscape = Landscape(model, workload.task, samples)
        return curves(landscape, directions_of(landscape, 2), scales=SCALES, lambdas=lambdas_of())

    def loop() -> object:
        landscape = Landscape(model, workload.task, samples)
        parameters = [*plain.parameters()]
        center = [parameter.clone() for parameter in parameters]
        found = []
        with torch.no_grad():
            for direction in directions_of(landscape, 2):
                parts = [*landscape.layout.tensors(direction).values()]
                for scale in SCALES:
                    for at in lambdas_of(41):
                        for parameter, begin, step in zip(parameters, center, parts, strict=True):
                            parameter.copy_(begin + float(at) * scale * step)
                        outputs = plain(samples.features)
                        loss = nn.functional.cross_entropy(outputs, samples.targets).item()
                        found.append((loss, (outputs.argmax(1) != samples.targets).double().mean().item()))
        return found

    return {"ours": ours, "loop": loop}


def resnet_curve() -> dict[str, Callable[[], object]]:
    """Time our curve, and only its passes, in the same layout and batches."""
    torch.manual_seed(0)
    model = resnet20((3, 32, 32), 10).eval()
    samples = Samples(features=torch.randn(IMAGES, 3, 32, 32), targets=torch.randint(10, (IMAGES,)))
    images = torch.randn(STATISTICS, 3, 32, 32)
    passing = copy.deepcopy(model)
    prepare(passing)

    def ours() -> object:
        landscape = Landscape(model, Classification(), samples, statistics=images, statistics_batch=BATCH)
        return curves(landscape, directions_of(landscape, 1), scales=[1.0], lambdas=lambdas_of())

    def passes() -> object:
        with torch.no_grad():
            for _ in range(41):
                passing.train()
                for batch in images.split(BATCH):
                    passing(laid_out(batch))
                passing.eval()
                outputs = [passing(laid_out(batch)) for batch in samples.features.split(BATCH)]
        return outputs

    return {"ours": ours, "passes": passes}


class Clock(Callback):
    """Records when each round ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_round(self, record: Record) -> None:
        self.times.append(time.perf_counter())


def round_ms(experiment: dict[str, Any], rounds: int, *, signs: bool) -> float:
    """Return the median duration of a round, without the first."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as root:
        own = {"rounds": rounds, "callbacks": [], "results": {"root": root, "signs": signs}}
        run(merged(experiment, own), callbacks=[clock])
    return statistics.median(1000 * (after - before) for before, after in pairwise(clock.times))


def measure(path: Path, *, repetitions: int) -> None:
    """Time everything in turn, after a warm-up turn."""
    before = machine()
    seconds: dict[str, dict[str, list[float]]] = {}
    for work, competitors in {"mlp": mlp_valley(), "resnet20": resnet_curve()}.items():
        of_work = seconds[work] = {name: [] for name in competitors}
        for repetition in range(repetitions + (work == "mlp")):
            for name, call in competitors.items():
                began = time.perf_counter()
                call()
                if repetition or work != "mlp":  # over a minute each, and no slower without a warm-up
                    of_work[name].append(time.perf_counter() - began)
    watched: dict[str, dict[str, list[float]]] = {}
    workloads = {"w1": merged(W1.experiment, {"client": {"path": "cohort"}}), "w2": W2.experiment}
    for name, experiment in workloads.items():
        found = watched[name] = {"off": [], "on": []}
        for _ in range(3 * repetitions if name == "w1" else repetitions):
            for state, values in found.items():
                values.append(round_ms(experiment, ROUNDS[name], signs=state == "on"))
    ratios = {
        "mlp": [one / other for one, other in zip(seconds["mlp"]["ours"], seconds["mlp"]["loop"], strict=True)],
        "resnet20": [
            one / other for one, other in zip(seconds["resnet20"]["ours"], seconds["resnet20"]["passes"], strict=True)
        ],
    }
    write_result(
        path,
        {
            **result_head(NAME, "Looking at valleys and signs", before, repetitions),
            "threads": torch.get_num_threads(),
            "seconds": {
                work: {name: dispersion(taken) for name, taken in found.items()} for work, found in seconds.items()
            },
            "ratio": {work: dispersion(found) for work, found in ratios.items()},
            "round_ms": {
                work: {state: dispersion(values) for state, values in found.items()} for work, found in watched.items()
            },
            "signs_ms": {
                work: dispersion([on - off for on, off in zip(found["on"], found["off"], strict=True)])
                for work, found in watched.items()
            },
            "signs_ratio": {
                work: dispersion([on / off for on, off in zip(found["on"], found["off"], strict=True)])
                for work, found in watched.items()
            },
        },
    )
    for work, found in seconds.items():
        for name, taken in found.items():
            print(f"{NAME}: {work} {name:8} {dispersion(taken)['median']:8.3f} s")
    for work, found in watched.items():
        for state, values in found.items():
            print(f"{NAME}: {work} signs {state:3} {dispersion(values)['median']:8.3f} ms a round")
