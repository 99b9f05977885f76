"""Export a workload for any Python: arrays.npz (data, split, initial parameters, cohorts) and task.json.

The files come from FedSign's own components, so that all competitors train the same clients on the same batches.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks.data
import benchmarks.networks
from benchmarks.workloads import BenchmarkWorkload
from fedsign.config import ExperimentConfig, from_dict
from fedsign.records import tensors_of
from fedsign.seeding import Purpose, generator
from fedsign.workload import Workload
from strategies.base import Strategy


def export(work: BenchmarkWorkload, cache: Path) -> Path:
    """Write a workload's folder, unless it exists; return it."""
    folder = cache / "workloads" / f"{work.name}-{_digest(work)}"
    if (folder / "task.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    workload = Workload(from_dict(work.experiment))
    config, dataset = workload.config, workload.dataset
    sizes = [len(index) for index in workload.partition]
    tensors = tensors_of(workload.make_model())
    arrays: dict[str, Any] = {
        "x_train": dataset.train.features.numpy(),
        "y_train": dataset.train.targets.numpy(),
        "x_test": dataset.test.features.numpy(),
        "y_test": dataset.test.targets.numpy(),
        "members": np.concatenate([np.asarray(index) for index in workload.partition]),
        "starts": np.concatenate([[0], np.cumsum(sizes)]),
        "cohorts": np.array([_cohort(config, round) for round in range(1, config.rounds + 1)]),
        **{f"tensor_{index}": tensor.numpy() for index, tensor in enumerate(tensors.values())},
    }
    np.savez(folder / "arrays.npz", **arrays)
    task = {
        "name": work.name,
        "seed": config.seed,
        "rounds": config.rounds,
        "network": work.network,
        "network_settings": work.network_settings,
        "num_tensors": len(tensors),
        "batch_size": config.client.batch_size,
        "epochs": config.client.local_epochs,
        "lr": config.client.lr,
        "num_clients": config.partition.num_clients,
        "cohort_size": config.server.cohort_size,
        "num_outputs": dataset.num_outputs,
        "experiment": work.experiment,
    }
    (folder / "task.json").write_text(json.dumps(task, indent=1), encoding="utf-8")  # last: it marks a complete folder
    return folder


def _cohort(config: ExperimentConfig, round: int) -> list[int]:
    """Return the clients that FedSign samples in a round."""
    rng = generator(config.seed, Purpose.SAMPLING, round=round)
    return Strategy().sample(round, range(config.partition.num_clients), config.server.cohort_size, rng)


def _digest(work: BenchmarkWorkload) -> str:
    """Return a digest of everything that determines the files."""
    content = json.dumps([work.experiment, work.network, work.network_settings], sort_keys=True)
    sources = [
        Path(str(module.__file__)).read_text(encoding="utf-8") for module in (benchmarks.data, benchmarks.networks)
    ]
    return hashlib.sha256("".join([content, *sources]).encode()).hexdigest()[:12]
