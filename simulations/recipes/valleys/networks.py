"""Networks for the recipes on valleys, trained as a federation of one client by the usual engine."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from fedsign.config import from_dict, merged
from fedsign.records import ObjectiveSpec, Tensors, TrainRequest
from fedsign.workload import Workload
from simulations.api import run
from simulations.landscape.target import Target, target_of
from simulations.landscape.valley import valley
from simulations.recipes.cells import ONE_CLIENT
from simulations.recipes.where import AT_HOME, Budget, BudgetOf, Where

EPOCHS = 40
_CENTRAL: dict[str, Any] = {
    **ONE_CLIENT,
    "rounds": EPOCHS,
    "data": {"name": "digits"},
    "client": {
        "local_epochs": 1,
        "batch_size": 32,
        "lr": 0.05,
        "optimizer": {"momentum": 0.9},
        "schedule": {"name": "cosine"},
    },
    "results": {"checkpoint_every": EPOCHS},
}


def central(changes: Mapping[str, Any] | None = None, where: Where = AT_HOME) -> dict[str, Any]:
    """Return the training of a network: the default MLP on digits, 40 epochs (one per round), with some changes."""
    return merged(merged(_CENTRAL, changes or {}), where.changes)


def trainings(full: int, quick: int, changes: Mapping[str, Any] | None = None) -> BudgetOf:
    """Return the cost of a recipe that trains this many networks in sequence."""
    return lambda is_quick, where: Budget(
        trainings=quick if is_quick else full, experiment=central(changes, where), processes=1
    )


def network(seed: int, changes: Mapping[str, Any] | None = None, where: Where = AT_HOME) -> Target:
    """Train a network; return it with its initial parameters, data and task."""
    with tempfile.TemporaryDirectory() as root:
        own = {"seed": seed, "results": {"root": root}}
        target = target_of(run(merged(central(changes, where), own)).path)
        # computed now: the run's folder is deleted at the end of this block
        _ = target.model, target.initial, target.workload.dataset
    return target


def networks(count: int, changes: Mapping[str, Any] | None = None, where: Where = AT_HOME) -> Iterator[Target]:
    """Train the networks of seeds 0, 1, ..."""
    return (network(seed, changes, where) for seed in range(count))


def errors_along(
    target: Target, *names: str, scale: float, draw: int = 0, **options: Any
) -> dict[str, Mapping[str, float]]:
    """Return mean errors on both sides and the asymmetry by name, along a draw of each noise or special directions."""
    found = valley(target, directions=names, draws=1, seed=draw, scales=(scale,), **options)
    return {row["direction"]: row for row in found.summary}


def trained_on_share(workload: Workload, start: Tensors, share: int, *, epochs: int) -> Tensors:
    """Train a model alone on one share of the data."""
    longer = workload.with_section("client", local_epochs=epochs)
    request = TrainRequest(
        round=1,
        partition=share,
        tensors=start,
        objective=ObjectiveSpec(),
        state_version=0,
        needed_versions=frozenset(),
    )
    with tempfile.TemporaryDirectory() as states:
        # without a federation: weights are wanted after single trainings, not a mean
        return SequentialTrainer(longer).train(request, ClientStore(Path(states))).tensors


def workload_in_shares(seed: int, num_shares: int, where: Where = AT_HOME) -> Workload:
    """Split the data into equal random shares."""
    return Workload(from_dict(central({"seed": seed, "partition": {"num_clients": num_shares}}, where)))
