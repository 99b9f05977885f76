"""The cost of digests in the server's checkpoints, in turn with the same files without digests.

Checkpoints of FedAvg and FedDyn for three models, forced to disk. Strategies with client state add the versions of
10,000 clients.  The plain variant is what `fedsign.storage.checkpoints` wrote before it had digests: the same tensors,
by the same steps.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.machine import machine
from benchmarks.measure import dispersion, result_head, write_result
from fedsign.records import Tensors
from fedsign.storage import checkpoints
from fedsign.storage.checkpoints import Checkpoint
from fedsign.storage.disk import replaced_folder

NAME = "checkpoint"
MODELS = {"mlp": 4_810, "resnet20": 272_474, "25m": 25_000_000}  # parameters
STRATEGIES = {"fedavg": 0, "feddyn": 1}  # state tensors per tensor of the model
NUM_CLIENTS = 10_000
ROUNDS = {"mlp": 50, "resnet20": 30, "25m": 8}  # checkpoints of each kind per turn


def measure(path: Path, *, repetitions: int) -> None:
    """Time both kinds in turn."""
    before = machine()
    metrics: dict[str, Any] = {}
    for model, num_parameters in MODELS.items():
        for strategy, num_states in STRATEGIES.items():
            given = checkpoint_of(num_parameters, num_states)
            turns = [save_times(given, ROUNDS[model]) for _ in range(repetitions)]
            metrics[f"{model} {strategy}"] = {
                "num_parameters": num_parameters,
                **{f"{kind}_ms": dispersion([turn[kind] for turn in turns]) for kind in ("ours", "plain")},
                "ratio": dispersion([turn["ours"] / turn["plain"] for turn in turns]),
            }
    write_result(path, {**result_head(NAME, "A checkpoint with digests", before, repetitions), "checkpoints": metrics})
    for name, row in metrics.items():
        ratio = row["ratio"]
        print(
            f"{name}: {row['ours_ms']['median']:.2f} ms, {ratio['median']:.3f} x "
            f"({ratio['lowest']:.3f}-{ratio['highest']:.3f})"
        )


def checkpoint_of(num_parameters: int, num_states: int) -> Checkpoint:
    """Make a model in ten tensors, with the state of strategy and clients."""
    sizes = [num_parameters // 10] * 10
    served = {f"layer.{number}": torch.randn(size) for number, size in enumerate(sizes)}
    strategy = {
        f"{name}.{each}": torch.randn_like(value) for each in range(num_states) for name, value in served.items()
    }
    return Checkpoint(
        round=1,
        served=served,
        strategy=strategy,
        client_versions=dict.fromkeys(range(NUM_CLIENTS), 1) if num_states else {},
        records={"rounds.jsonl": "0" * 16, "timings.jsonl": "0" * 16},
    )


def save_times(given: Checkpoint, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each kind."""
    taken: dict[str, list[float]] = {"ours": [], "plain": []}
    with tempfile.TemporaryDirectory() as root:
        for _ in range(rounds):
            for kind, write in (("ours", save), ("plain", save_plain)):
                started_at = time.perf_counter()
                write(Path(root) / kind, given)
                taken[kind].append(1000 * (time.perf_counter() - started_at))
    return {kind: statistics.median(each) for kind, each in taken.items()}


def save(folder: Path, given: Checkpoint) -> None:
    """Save as a run does."""
    checkpoints.save(folder, given, keep=2)


def save_plain(folder: Path, given: Checkpoint) -> None:
    """Save without digests."""
    versions = given.client_versions
    files: dict[str, Tensors | None] = {
        "served": given.served,
        "strategy": given.strategy or None,
        "clients": table_of(versions) if versions else None,
    }
    with replaced_folder(folder / f"round-{given.round:06d}") as target:
        for name, tensors in files.items():
            if tensors is not None:
                plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
                save_file(plain, target / f"{name}.safetensors")
        state = {"format": 2, "round": given.round, "num_clients_with_state": len(versions)}
        (target / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    checkpoints.rounds_on_disk(folder)  # as a run does, to find outdated ones
    set(folder.glob("round-??????"))


def table_of(versions: Mapping[int, int]) -> Tensors:
    """Return the clients' versions, by ascending partition."""
    partitions = np.fromiter(versions.keys(), dtype=np.int64, count=len(versions))
    order = np.argsort(partitions)
    values = np.fromiter(versions.values(), dtype=np.int64, count=len(versions))
    return {"partition": torch.from_numpy(partitions[order]), "version": torch.from_numpy(values[order])}


if __name__ == "__main__":
    measure(Path(__file__).parents[1] / "results" / f"{NAME}.json", repetitions=5)
