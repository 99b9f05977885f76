"""Networks for the recipes of valleys: trained on digits as a federation of one client, by the same engine as any run."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.config import from_dict, merged
from fedsign.errors import RoundError
from fedsign.landscape.landscape import Landscape
from fedsign.landscape.noise import noise, with_signs
from fedsign.landscape.scaling import Scaling, scaled
from fedsign.landscape.valley import Sides, curves
from fedsign.records import ObjectiveSpec, Tensors, TrainReply, TrainRequest
from fedsign.workload import Workload
from simulations.api import run
from simulations.landscape.subject import Subject, subject_of

EPOCHS = 40
_CENTRAL: dict[str, Any] = {
    "name": "central",
    "rounds": EPOCHS,
    "strategy": {"name": "fedavg"},
    "data": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 1},
    "server": {"cohort_size": 1},
    "client": {
        "local_epochs": 1,
        "batch_size": 32,
        "lr": 0.05,
        "optimizer": {"momentum": 0.9},
        "schedule": {"name": "cosine"},
    },
    "callbacks": [],
    "results": {"checkpoint_every": EPOCHS},
}


def network(seed: int, changes: Mapping[str, Any] | None = None) -> Subject:
    """A network with its initial parameters, its data and its task: the default MLP, 40 epochs (a round is one)."""
    with tempfile.TemporaryDirectory() as root:
        own = {"seed": seed, "results": {"root": root, "checkpoint_every": EPOCHS}}
        done = run(merged(merged(_CENTRAL, changes or {}), own))
        subject = subject_of(done.path)
        _ = subject.model, subject.initial, subject.workload.dataset
    return subject


def landscapes(num_networks: int, changes: Mapping[str, Any] | None = None) -> Iterator[tuple[Subject, Landscape]]:
    """Networks of the seeds 0, 1, ..., each with its landscape on all test samples."""
    for seed in range(num_networks):
        subject = network(seed, changes)
        yield subject, landscape_of(subject)


def landscape_of(subject: Subject) -> Landscape:
    """On all test samples, BatchNorm's statistics of 500 training samples."""
    test = subject.test_samples(None)
    return Landscape(subject.model, subject.workload.task, test, statistics=subject.statistics(500))


def sides_along(
    landscape: Landscape,
    name: str,
    *,
    draw: int,
    scale: float,
    signs: float | None = None,
    where: Tensor | None = None,
    scaling: Scaling = Scaling.NORM,
) -> Sides:
    """The sides of the error along one draw of a noise; `signs`: the fraction that gets the model's."""
    layout, theta = landscape.layout, landscape.centre
    eps = noise(name, layout.size, seed=draw)
    if signs is not None:
        eps = with_signs(eps, theta, fraction=signs, seed=draw)
    return sides_of_direction(landscape, scaled(layout, eps, theta, scaling, where=where), scale=scale)


def sides_of_direction(landscape: Landscape, direction: Tensor, *, scale: float) -> Sides:
    """The sides of the error along a direction that is scaled already."""
    return curves(landscape, [direction], scales=[scale])[0][0].sides("error")


def trained_on_share(workload: Workload, start: Tensors, share: int, *, epochs: int) -> Tensors:
    """What a client that holds one share of the data makes of a model by itself."""
    longer = workload.with_client(local_epochs=epochs)
    request = TrainRequest(
        round=1,
        partition=share,
        tensors=start,
        objective=ObjectiveSpec(),
        state_version=0,
        needed_versions=frozenset(),
    )
    with tempfile.TemporaryDirectory() as states:
        (reply,) = SequentialTrainer(longer).train_many([request], ClientStore(Path(states)))
    if not isinstance(reply, TrainReply):
        raise RoundError(f"a network could not be trained: {reply.reason}")
    return reply.tensors


def workload_in_shares(seed: int, num_shares: int) -> Workload:
    """Digits in equal random shares."""
    return Workload(from_dict(merged(_CENTRAL, {"seed": seed, "partition": {"num_clients": num_shares}})))
