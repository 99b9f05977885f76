"""Comparisons in the format of `fedsign compare`, with curves from a formula and noise from a seed."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsign.comparison.over_seeds import summarize
from fedsign.comparison.summary import Cell, CellResult, Plan, Summary, products

STRATEGIES = {
    "fedavg": ("FedAvg", 0.948, 22.0),
    "fedprox": ("FedProx", 0.947, 22.0),
    "feddyn": ("FedDyn", 0.976, 9.0),
    "fedsign": ("FedSign", 0.955, 14.0),
    "scaffold": ("SCAFFOLD", 0.962, 12.0),
    "moon": ("MOON", 0.945, 24.0),
    "fedpan": ("FedPAN", 0.951, 20.0),
    "flower_fedadam": ("FedAdam (Flower)", 0.93, 30.0),
}
"""Name -> label, final accuracy, rounds in which it grows by a factor e."""

FAILURE = "round 3: <all> 4 replies were refused & the round has no update; lower client.lr."

ALPHAS = ({"partition.alpha": 10.0}, {"partition.alpha": 1.0}, {"partition.alpha": 0.1})

CONFIG = """name = "trial"
seed = 0
rounds = 150
metrics = ["accuracy"]

[data]
name = "digits"

[partition]
name = "dirichlet"
num_clients = 20
alpha = 0.1

[client]
lr = 0.1

[client.optimizer]
name = "sgd"
"""


def a_line(round: int, *, top: float, tau: float, noise: random.Random, **values: Any) -> dict[str, Any]:
    """A line of rounds.jsonl."""
    accuracy = min(1.0, max(0.0, top * (1 - 0.85 * math.exp(-round / tau)) + noise.gauss(0, 0.012)))
    return {
        "round": round,
        "loss": 2.3 * math.exp(-round / tau) + 0.15 + abs(noise.gauss(0, 0.02)),
        "accuracy": accuracy,
        "rmse": 3.0 * (1 - accuracy) + 0.02,
        "validation_accuracy": accuracy - 0.01,
        "train_loss": 2.2 * math.exp(-round / tau) + 0.05,
        "clients": [round % 20],
        "num_replies": 1,
        "failures": [{"client": 3, "reason": "out of memory"}] if round == 7 and noise.random() < 0.2 else [],
        "bytes_down": 106_000,
        "bytes_up": 106_000,
        "update_norm": 1.0,
        "client_drift": 1.2 + 1.5 * (1 - math.exp(-round / tau)) + noise.gauss(0, 0.05),
        **values,
    }


def a_population(condition: Mapping[str, Any]) -> dict[str, Any]:
    """Samples of 20 clients; the smaller alpha, the fewer classes a client holds."""
    alpha, draw = condition.get("partition.alpha", 0.1), random.Random(str(condition))
    shares = [[draw.gammavariate(alpha, 1.0) + 1e-9 for _ in range(10)] for _ in range(20)]
    counts = [[round(60 * share / sum(row)) for share in row] for row in shares]
    return {"class_names": [str(digit) for digit in range(10)], "counts": counts}


def a_comparison(
    path: Path,
    *,
    strategies: Sequence[str] = ("fedavg", "fedprox", "feddyn", "fedsign"),
    conditions: Sequence[Mapping[str, Any]] = ({},),
    seeds: int = 5,
    rounds: int = 60,
    grid: Mapping[str, Sequence[Any]] | None = None,
    metric: str = "accuracy",
    target: float | None = None,
    unfinished: Sequence[tuple[str, int]] = (),
    failed: Sequence[tuple[str, int]] = (),
    diverged: Sequence[tuple[str, int]] = (),
    labels: Mapping[str, str] | None = None,
    name: str = "trial",
    extra: Mapping[str, Any] | None = None,
) -> Summary:
    """A summary of made-up runs; those that are unfinished, failed or diverged are named as (strategy, seed)."""
    results = []
    for condition in conditions:
        for strategy in strategies:
            _, top, tau = STRATEGIES[strategy]
            alpha = float(condition.get("partition.alpha", 0.1))
            top = 0.98 - (0.98 - top) * min(1.0, 0.4 / (alpha + 0.3))
            for choice in products(grid or {}) if strategy == "fedsign" else [{}]:
                for seed in range(seeds):
                    cell = Cell(
                        id=f"{len(results)}",
                        strategy=strategy,
                        condition=condition,
                        choice=choice,
                        seed=seed,
                        rounds=rounds,
                    )
                    if (strategy, seed) in failed:
                        results.append(CellResult(cell=cell, is_finished=False, failure=FAILURE))
                        continue
                    if (strategy, seed) in unfinished:
                        results.append(CellResult(cell=cell, is_finished=False))
                        continue
                    noise = random.Random(f"{strategy} {condition} {choice} {seed}")
                    level = top + random.Random(f"{condition} {seed}").gauss(0, 0.006) + noise.gauss(0, 0.002)
                    lines = [
                        a_line(
                            n,
                            top=level - 0.01 * abs(math.log10(choice.get("strategy.gamma", 0.01) / 0.01)),
                            tau=tau,
                            noise=noise,
                            **(extra or {}),
                        )
                        for n in range(1, rounds + 1)
                    ]
                    if (strategy, seed) in diverged:
                        lines = [line | {"accuracy": None, "loss": None, "rmse": None} for line in lines]
                    results.append(
                        CellResult(
                            cell=cell,
                            is_finished=True,
                            folder=_folder(path / "cells" / cell.id, lines, seed),
                            records=lines,
                            population=a_population(condition),
                            seconds=12.5,
                        )
                    )
    plan = Plan(
        name=name,
        metric=metric,
        higher_is_better=metric == "accuracy",
        reference=strategies[0],
        target=target,
        labels={strategy: (labels or {}).get(strategy, STRATEGIES[strategy][0]) for strategy in strategies},
        seeds=tuple(range(seeds)),
        cells=tuple(each.cell for each in results),
        config_toml=CONFIG,
        request={},
        environment={"fedsign": "0.2.0", "torch": "2.13.0", "git": ""},
    )
    return summarize(plan, path, results)


def _folder(path: Path, lines: Sequence[Mapping[str, Any]], seed: int) -> Path:
    """The two files of a run that an export reads."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(f"seed = {seed}\n", encoding="utf-8")
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
