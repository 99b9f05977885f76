"""A sparse client's round compared with a dense one's: time per local step, and bytes sent.

Model and optimizer are those of `simulations.recipes.smupar.federated_smupar` at width 256: 2 blocks, heads of 32,
characters of `pytext`, AdamW.  Each competitor trains one client for a round of 20 local steps. The time covers all of
the client's work, including unpacking rows into whole tensors and packing them again.

- dense:       density 1, torch's AdamW;
- masked 1/d:  density 1/d, torch's AdamW on whole tensors, dense products: the cost of the masks alone;
- packed 1/d:  density 1/d, `packed_adamw`, which keeps moments for nonzero weights only, and products chosen by `auto`.

All take turns; ratios are to the dense client of the same turn.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.measure import dispersion, result_head, write_result
from clients.state.store import ClientStore
from clients.trainer import SequentialTrainer
from clients.working_model import WorkingModel
from fedsign.config import ExperimentConfig, from_dict
from fedsign.records import ObjectiveSpec, TrainRequest
from fedsign.workload import Workload

NAME = "sparse_clients"
SHARES, BATCH, LENGTH, WIDTH, STEPS = (4, 16, 64), 8, 128, 256, 20
COMPETITORS = ["dense", *(f"{kind} 1/{share}" for share in SHARES for kind in ("masked", "packed"))]


def experiment(competitor: str) -> ExperimentConfig:
    """Return a competitor's experiment."""
    kind, _, share = competitor.partition(" 1/")
    optimizer = "packed_adamw" if kind == "packed" else "adamw"
    return from_dict(
        {
            "task": "language",
            "metrics": [],
            "data": {"name": "pytext", "block_length": LENGTH},
            "partition": {"name": "iid", "num_clients": 1},
            "server": {"cohort_size": 1},
            "model": {"name": "gpt", "depth": 2, "width": WIDTH, "num_heads": WIDTH // 32, "bias": False},
            "engine": {"sparse_products": "auto" if kind == "packed" else "dense"},
            "parameterization": {"name": "smupar", "base_width": 64, "density": 1 / int(share or 1), "init_std": 0.087},
            "client": {
                "local_steps": STEPS,
                "batch_size": BATCH,
                "lr": 2**-9,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
                "optimizer": {"name": optimizer, "beta1": 0.9, "beta2": 0.95},
            },
        }
    )


class Client:
    """A client that has received the initial model."""

    def __init__(self, competitor: str, states: ClientStore) -> None:
        workload = Workload(experiment(competitor))
        self._trainer, self._states = SequentialTrainer(workload), states
        self._request = TrainRequest(
            round=1,
            partition=0,
            tensors=WorkingModel(workload.make_model(), workload.numerics).copies(),
            objective=ObjectiveSpec(),
            state_version=0,
            needed_versions=frozenset(),
        )
        self.num_bytes = sum(tensor.nbytes for tensor in self._request.tensors.values())

    def step_s(self) -> tuple[float, float]:
        """Return a round's time per step, in wall-clock and process time."""
        began, own = time.perf_counter(), time.process_time()
        reply = self._trainer.train(self._request, self._states)
        taken = (time.perf_counter() - began) / STEPS, (time.process_time() - own) / STEPS
        if sum(tensor.nbytes for tensor in reply.tensors.values()) != self.num_bytes:
            raise RuntimeError(
                "a client sent other bytes than it received, so that the competitors cannot be compared."
            )
        return taken


def measure(path: Path, *, repetitions: int) -> None:
    """Measure all competitors in turn, after a warm-up turn."""
    before = machine()
    taken: dict[str, list[tuple[float, float]]] = {competitor: [] for competitor in COMPETITORS}
    with TemporaryDirectory() as folder:
        clients = {competitor: Client(competitor, ClientStore(Path(folder) / competitor)) for competitor in COMPETITORS}
        for repetition in range(repetitions + 1):
            for competitor, client in clients.items():
                seconds = client.step_s()
                if repetition:
                    taken[competitor].append(seconds)
                    print(f"{NAME}: {competitor} {1000 * seconds[0]:.0f} ms a step", flush=True)
    result: dict[str, Any] = {
        **result_head(NAME, "Sparse clients", before, repetitions),
        "threads": torch.get_num_threads(),
        "bytes": {competitor: client.num_bytes for competitor, client in clients.items()},
        "step_s": {competitor: dispersion([wall for wall, _ in values]) for competitor, values in taken.items()},
        "step_ratio": {competitor: _ratio(values, taken["dense"], 0) for competitor, values in taken.items()},
        "cpu_ratio": {competitor: _ratio(values, taken["dense"], 1) for competitor, values in taken.items()},
    }
    write_result(path, result)
    for competitor, ratio in result["step_ratio"].items():
        print(f"{NAME}: {competitor}: {ratio['median']:.3f} of a dense step")


def _ratio(ours: list[tuple[float, float]], dense: list[tuple[float, float]], of: int) -> dict[str, float]:
    return dispersion([one[of] / other[of] for one, other in zip(ours, dense, strict=True)])
