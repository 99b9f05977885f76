"""Small runs of a test's own model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from simulations import Run, run


def played(root: Path, model: Callable[..., nn.Module], /, **changes: Any) -> Run:
    return run(
        {
            "rounds": 2,
            "callbacks": [],
            "partition": {"num_clients": 4, "alpha": 1.0},
            "server": {"cohort_size": 3},
            "client": {"local_steps": 3},
            "strategy": {"name": "fedavg"},
            "model": {"name": f"{model.__module__}:{model.__name__}"},
            "results": {"root": str(root / model.__name__)},
            **changes,
        }
    )


def lines(done: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.path / "rounds.jsonl").read_text().splitlines()]
