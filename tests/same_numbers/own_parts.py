"""User-defined parts of the configurations: data, a strategy with its own objective, and one over messages."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fedsign
from fedsign.objectives.base import LocalContext, Objective
from fedsign.records import ObjectiveSpec, Tensors
from strategies.base import Aggregate, Strategy
from strategies.feddyn import FedDyn

if (code := os.environ.get("SAME_NUMBERS_CODE")) and not Path(str(fedsign.__file__)).is_relative_to(code):
    raise ImportError(f"a process of an engine imports {fedsign.__file__}; expected a folder below {code}.")


class AnchorLoss(Objective):
    """Task loss + (strength/2) ||theta - anchor_k||^2; the anchor follows the client's own models."""

    has_state = True

    def __init__(self, *, strength: float = 0.01) -> None:
        self.strength = strength

    def penalty(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensor | None:
        distances = [(theta - context.state[name]).square().sum() for name, theta in parameters.items()]
        return 0.5 * self.strength * torch.stack(distances).sum()

    def initial_state(self, received: Tensors) -> Tensors:
        return {name: theta.clone() for name, theta in received.items()}

    def next_state(self, parameters: Mapping[str, Tensor], context: LocalContext) -> Tensors:
        return {name: 0.5 * (context.state[name] + theta) for name, theta in parameters.items()}


class Anchored(Strategy):
    """theta_{t+1} = theta_t + m_t,  m_t = momentum m_{t-1} + (mean - theta_t)."""

    def __init__(self, *, strength: float = 0.01, momentum: float = 0.5) -> None:
        super().__init__(weighting="uniform")
        self.strength, self.momentum = strength, momentum
        self.velocity: Tensors = {}

    def objective(self, round: int) -> ObjectiveSpec:
        return ObjectiveSpec(name="own_parts:AnchorLoss", settings={"strength": self.strength})

    def server_update(self, aggregate: Aggregate) -> Tensors:
        for name in aggregate.parameters:
            before = self.velocity.get(name, torch.zeros_like(aggregate.mean[name]))
            self.velocity[name] = self.momentum * before + (aggregate.mean[name] - aggregate.served[name])
        return {
            name: aggregate.served[name] + self.velocity[name] if name in self.velocity else tensor
            for name, tensor in aggregate.mean.items()
        }

    move = server_update  # its name in earlier commits

    def state_dict(self) -> Tensors:
        return dict(self.velocity)

    def load_state_dict(self, state: Tensors) -> None:
        self.velocity = dict(state)


class ByMessages(FedDyn):
    """FedDyn over Flower messages, in process."""

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        return super().aggregate_train(server_round, replies)


def write_inputs(folder: Path) -> None:
    """A secret, three sites with tables, lines of text of two owners, and a table with numbers to predict."""
    folder.mkdir()
    (folder / "secret").write_bytes(bytes(range(32)))
    for site, size in enumerate((60, 40, 30)):
        rng = np.random.default_rng(site)
        x = rng.normal(size=(size, 5)).astype(np.float32)
        y, cut = (x[:, 0] + 0.3 * x[:, 1] > 0).astype(int), size * 4 // 5
        (folder / f"site {site}").mkdir()
        np.savez(folder / f"site {site}" / "data.npz", x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])
    sums = [{"instruction": f"Add {k} and {k + 1}.", "output": f"{2 * k + 1}", "who": "ab"[k % 2]} for k in range(40)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sums), encoding="utf-8")
    rows = np.random.default_rng(9).normal(size=(120, 3))
    text = "".join(f"{a:.4f},{b:.4f},{a - 2 * b + 0.1 * c:.4f}\n" for a, b, c in rows)
    (folder / "table.csv").write_text("a,b,target\n" + text, encoding="utf-8")
