"""Scaling curves: one quantity varies, all else is fixed; each point is a workload."""

from typing import Any

from benchmarks.workloads import BenchmarkWorkload

_COMPETITORS = ("bare_loop", "floor", "sequential", "cohort", "pfl_1", "fedlab")
_PER_CLIENT = 20


def _points(num_clients: int, cohort_size: int, hidden: list[int], per_client: int = _PER_CLIENT) -> dict[str, Any]:
    return {
        "experiment": {
            "name": "scaling",
            "rounds": 10,
            "strategy": {"name": "fedavg"},
            "data": {
                "name": "benchmarks.data:class_vectors",
                "num_train": num_clients * per_client,
                "num_test": 500,
                "width": 64 if per_client == _PER_CLIENT else 16,
            },
            "partition": {"name": "iid", "num_clients": num_clients},
            "model": {"name": "mlp", "hidden": hidden},
            "server": {"cohort_size": cohort_size},
            "client": {"local_epochs": 1, "batch_size": 16, "lr": 0.1, "optimizer": {"momentum": 0.0}},
        },
        "network": "mlp",
        "network_settings": {"hidden": hidden},
        "warm_up_rounds": 2,
        "competitors": _COMPETITORS,
        "min_accuracy": 0.3,
        "loss_tolerance": 1e-3,
    }


COHORTS = tuple(
    BenchmarkWorkload(
        name=f"cohort-size-{size}",
        title=f"Cohort of {size}",
        about=f"{size} of 1,000 clients a round, 20 samples each, MLP 64-64-10, batches of 16, 10 rounds.",
        curve=("clients a round", size),
        **_points(1000, size, [64]),
    )
    for size in (10, 30, 100, 300)
)

POPULATIONS = tuple(
    BenchmarkWorkload(
        name=f"population-{size}",
        title=f"Population of {size:,}",
        about=f"10 of {size:,} clients a round, 4 samples each, MLP 16-64-10, batches of 16, 10 rounds.",
        curve=("clients in the population", size),
        **_points(size, 10, [64], per_client=4),
    )
    for size in (100, 10_000, 1_000_000)
)

MODELS = tuple(
    BenchmarkWorkload(
        name=f"model-size-{'-'.join(map(str, hidden))}",
        title=f"MLP with {' and '.join(map(str, hidden))} hidden units",
        about=f"10 of 1,000 clients a round, 20 samples each, batches of 16, 10 rounds; {parameters:,} parameters.",
        curve=("parameters of the model", parameters),
        **_points(1000, 10, hidden),
    )
    for hidden, parameters in (([64], 4_810), ([256], 19_210), ([1024], 76_810), ([1024, 1024], 1_126_410))
)

CURVES = (*COHORTS, *POPULATIONS, *MODELS)
