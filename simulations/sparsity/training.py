"""The final held-out loss of an experiment, by which settings are chosen.

With a number of steps, training is centralized: one client has all clients' samples and takes that many steps, with the
experiment's optimizer, schedule, precision and clipping; strategy, faults, attack and privacy are ignored.  Without
one, the experiment's federation is run to its last round.
"""

import logging
import tempfile
from math import nan
from pathlib import Path

import numpy as np
from torch import nn

from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer, check_training
from fedsign.config import ExperimentConfig, from_dict, from_toml
from fedsign.data.client_data import client_data_of
from fedsign.errors import ConfigError, RoundError
from fedsign.models.transform import packing_of, whole_state
from fedsign.records import ObjectiveSpec, TrainRequest, tensors_of
from fedsign.storage.results import final_value
from fedsign.traits import EngineTraits
from fedsign.transport.connection import Connection, Message
from fedsign.workload import Workload
from simulations import api
from simulations.backends.base import intra_op_threads
from simulations.jobs import answer_all
from simulations.sparsity.cells import write_loss

VALIDATION_FRACTION = 0.1
_log = logging.getLogger("fedsign")


def held_out(config: ExperimentConfig) -> ExperimentConfig:
    """Return the experiment with held-out samples: the configured fraction, or a tenth."""
    if config.data.validation_fraction:
        return config
    return config.replace(**{"data.validation_fraction": VALIDATION_FRACTION})


def alone(config: ExperimentConfig, steps: int) -> ExperimentConfig:
    """Return the experiment as centralized training.

    Raises:
        ConfigError: its clients hold their own data.
    """
    if client_data_of(config) is not None:
        raise ConfigError(
            f"partition.name={config.partition.name} was given with --steps, which trains in one place; drop --steps "
            "to run the experiment's rounds."
        )
    # one client is no cohort to stack, and the sweep's workers already share the cores
    kept = {"local_steps": steps, "local_epochs": 0, "path": "sequential", "chunk": 0, "sharding": {}}
    data = config.model_dump(mode="json")
    return from_dict(
        # sections of the federation get their defaults; [server] holds its optimizer and cohort
        {key: value for key, value in data.items() if key not in ("faults", "attack", "privacy", "server")}
        | {
            "rounds": 1,
            "strategy": {"name": "fedavg"},
            "partition": {"name": "iid", "num_clients": 1},
            "server": {"cohort_size": 1},
            "client": data["client"] | kept,
        }
    )


def check(config: ExperimentConfig, *, steps: int, like: Workload | None = None) -> Workload:
    """Build every component of a training, so that a mistake is one error before the first of many trainings.

    Raises:
        FedSignError: it cannot be trained.
    """
    if not steps:
        if not EngineTraits.of(config.engine.name).trains_here:
            raise ConfigError(
                f"engine.name={config.engine.name} was given, but a sweep runs its federations in process; drop the "
                "engine, or give --steps to train without a federation."
            )
        return api.check(config, like=like)
    workload = Workload(alone(config, steps))
    if like is not None:
        workload.take_data(like)
    check_training(workload, ObjectiveSpec())
    return workload


class Trainings:
    """Trainings in sequence; data shared with the previous one are reused."""

    def __init__(self) -> None:
        self._last: Workload | None = None

    def loss(self, config: ExperimentConfig, *, steps: int, samples: int) -> float:
        """Return the final loss; NaN or infinity if training diverged."""
        if not steps:
            return _federated(config)
        workload = Workload(alone(config, steps))
        if self._last is not None:
            # cells of a worker mostly differ in a rate or a density
            workload.take_data(self._last)
        self._last = workload
        with intra_op_threads(config.engine.threads):
            return _validated(workload, _trained(workload), samples)


def main(parent: Connection) -> None:
    """Worker process that trains cells of a sweep. Each cell's file is written atomically."""
    trainings = Trainings()

    def run_cell(message: Message) -> None:
        loss = trainings.loss(from_toml(message["config"]), steps=message["steps"], samples=message["samples"])
        write_loss(Path(message["path"]), loss, message["words"])

    answer_all(parent, run_cell)


def _trained(workload: Workload) -> nn.Module:
    model = workload.make_model()
    packing = packing_of(model)
    request = TrainRequest(
        round=1,
        partition=0,
        tensors=packing.packed(tensors_of(model)),
        objective=ObjectiveSpec(),
        state_version=0,
        needed_versions=frozenset(),
    )
    with tempfile.TemporaryDirectory() as states:
        # no copies: the model is not used again by the trainer
        reply = SequentialTrainer(workload, copies=False).train(request, ClientStore(Path(states)))
        model.load_state_dict({**model.state_dict(), **whole_state(model, reply.tensors)})  # LISA replies with a part
    return model


def _validated(workload: Workload, model: nn.Module, samples: int) -> float:
    held = workload.dataset.validation
    if held is None:
        raise ConfigError("data.validation_fraction=0 leaves no samples to choose by; raise it.")
    if 0 < samples < len(held):
        # evenly spaced, not drawn: all cells are judged by the same samples
        held = held[np.linspace(0, len(held) - 1, samples).round().astype(np.int64)]
    return workload.evaluate(model, (held, None))["loss"]


def _federated(config: ExperimentConfig) -> float:
    with tempfile.TemporaryDirectory() as root:
        try:
            run = api.run(config.replace(callbacks=[], **{"results.root": root}))
        except RoundError as error:  # raised by a round whose clients all diverged
            _log.warning("a cell counts as diverged: %s", error)
            return nan
        value = final_value(run.rounds, "validation_loss")
    return nan if value is None else value
