"""The cost of engines: seconds and bytes of a round in process, with workers, on Ray, on a SuperLink; Flower's floor.

Four clients take one step of a small or a larger MLP on digits, so communication dominates.  The *floor* of an engine
is an app that does nothing: Flower's own `Grid.send_and_receive`, clients that echo the arrays and import neither torch
nor FedSign, and SuperNodes started by Flower.

Rows are run in turn, each in a separate process.  Bytes are counted on the loopback. They include the hops between a
SuperLink, its SuperNodes and their processes, and unrelated local traffic.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.machine import machine
from benchmarks.measure import Result, dispersion, result_head, write_result

NAME = "engines"
NUM_CLIENTS, ROUNDS = 4, 4
MODELS = {"small": [64], "large": [1000, 1000]}
ENGINES: dict[str, dict[str, Any]] = {
    "in_process": {},
    "workers": {"engine": {"workers": 2}},
    "ray": {"engine": {"name": "ray", "init_args": {"num_cpus": 2}}},
    "superlink": {"engine": {"name": "superlink", "num_supernodes": NUM_CLIENTS}},
}
FLOORS = ("floor_ray", "floor_superlink")
_MOST_S = 600.0  # per run

_SERVER = """
import json, time
from itertools import pairwise
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    facts = context.run_config
    model = [np.zeros(int(size), dtype=np.float32) for size in str(facts["sizes"]).split(",")]
    while len(list(grid.get_node_ids())) < int(facts["clients"]):
        time.sleep(0.1)
    lines = []
    for round in range(int(facts["rounds"])):
        began = time.perf_counter()
        content = RecordDict({"arrays": ArrayRecord(model), "config": ConfigRecord({"server-round": round})})
        messages = [Message(content, node, "train") for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages))
        if len(replies) != len(messages) or any(reply.has_error() for reply in replies):
            raise RuntimeError("not everybody answered")
        received = int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())
        lines.append({"train_s": time.perf_counter() - began, "loopback": received})
    partial = Path(str(facts["out"]) + ".partial")
    partial.write_text(json.dumps(lines))
    partial.rename(str(facts["out"]))
"""
_CLIENT = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)
"""


def sizes_of(hidden: list[int]) -> list[int]:
    """Return the sizes of the digits MLP's tensors, in order."""
    widths = [64, *hidden, 10]
    return [size for before, after in pairwise(widths) for size in (before * after, after)]


def run_engine(name: str, hidden: list[int], root: Path) -> Result:
    """Run FedSign; return the seconds of its rounds and the bytes on the loopback."""
    from simulations import run
    from simulations.callbacks.base import Callback

    counted: list[int] = []

    class Counter(Callback):
        def on_round(self, record: Any) -> None:
            counted.append(loopback_bytes())

    began = time.perf_counter()
    done = run(
        {
            "rounds": ROUNDS,
            "callbacks": [],
            "strategy": {"name": "fedavg"},
            "partition": {"name": "iid", "num_clients": NUM_CLIENTS},
            "server": {"cohort_size": NUM_CLIENTS},
            "client": {"local_steps": 1},
            "model": {"name": "mlp", "hidden": hidden},
            "results": {"root": str(root), "checkpoint_every": ROUNDS},
            **ENGINES[name],
        },
        callbacks=[Counter()],
    )
    lines = [
        {"train_s": timing["train_s"], "loopback": count}
        for timing, count in zip(done.folder.timings(), counted, strict=True)
    ]
    payload = done.rounds[-1]["bytes_down"] + done.rounds[-1]["bytes_up"]
    return {"lines": lines, "payload": payload, "whole_s": time.perf_counter() - began, "loss": done.rounds[-1]["loss"]}


def run_floor(name: str, hidden: list[int], root: Path) -> Result:
    """Run only Flower, with the same arrays."""
    sizes, out = sizes_of(hidden), root / "lines.json"
    app = root / "app"
    app.mkdir()
    (app / "echo_server.py").write_text(_SERVER, encoding="utf-8")
    (app / "echo_client.py").write_text(_CLIENT, encoding="utf-8")
    facts = {"sizes": ",".join(map(str, sizes)), "rounds": ROUNDS, "clients": NUM_CLIENTS, "out": str(out)}
    parts = {"serverapp": "echo_server:app", "clientapp": "echo_client:app"}
    project = {"name": "echo", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []}
    flower = {"tool": {"flwr": {"app": {"publisher": "echo", "components": parts, "config": facts}}}}
    (app / "pyproject.toml").write_text(tomli_w.dumps({"project": project, **flower}), encoding="utf-8")
    began = time.perf_counter()
    {"floor_ray": _floor_ray, "floor_superlink": _floor_superlink}[name](app, facts, root)
    lines = json.loads(out.read_text(encoding="utf-8"))
    return {"lines": lines, "payload": 2 * NUM_CLIENTS * 4 * sum(sizes), "whole_s": time.perf_counter() - began}


def _floor_ray(app: Path, facts: dict[str, Any], root: Path) -> None:
    from flwr.app import Context
    from flwr.serverapp import Grid

    from fedsign.flower.ray_backend import run_on_ray

    sys.path.insert(0, str(app))
    import echo_server  # type: ignore[import-not-found]

    def serve(grid: Grid, context: Context) -> None:
        context.run_config = facts
        echo_server.main(grid, context)

    backend: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}
    run_on_ray(serve, app_folder=app, client_app="echo_client:app", num_nodes=NUM_CLIENTS, backend_config=backend)


def _floor_superlink(app: Path, facts: dict[str, Any], root: Path) -> None:
    from fedsign.flower.programs import find_program
    from simulations.deployment.engine import submission, superlink
    from simulations.deployment.membership import control

    local, out = superlink.LocalDeployment(root / "flower", root / "logs"), Path(facts["out"])
    try:
        local.start_link(timeout_s=60.0)
        for index in range(NUM_CLIENTS):
            local.start_node(f"supernode-{index}", {"partition-id": index}, script=find_program("flower-supernode"))
        with control(local.address, authority=None) as link:
            submission.submit(app, link)
        deadline = time.monotonic() + _MOST_S
        while not out.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Flower did not finish {ROUNDS} rounds within {_MOST_S:g} s.")
            time.sleep(0.2)
    finally:
        local.end()


def loopback_bytes() -> int:
    """Return the bytes received on the loopback since boot."""
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text(encoding="utf-8"))


def run_row(row: str, model: str) -> Result:
    """Measure a row in a separate process; return medians over the rounds, without the first."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.alone.engines", row, model],
        capture_output=True,
        text=True,
        timeout=_MOST_S + 60,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{row} was not measured: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    lines = found["lines"]
    counts = [after["loopback"] - before["loopback"] for before, after in pairwise(lines)]
    return {
        "round_s": statistics.median(line["train_s"] for line in lines[1:]),
        "first_round_s": lines[0]["train_s"],
        "whole_s": found["whole_s"],
        "loopback_bytes": statistics.median(counts),
        "payload_bytes": found["payload"],
        "loss": found.get("loss"),
    }


def measure(path: Path, *, repetitions: int) -> None:
    """Measure all rows in turn, `repetitions` times."""
    before = machine()
    rows = [*ENGINES, *FLOORS]
    found: dict[str, dict[str, list[Result]]] = {model: {row: [] for row in rows} for model in MODELS}
    for _ in range(repetitions):
        for model, of_model in found.items():
            for row in rows:
                of_model[row].append(run_row(row, model))
                print(f"{model:6}{row:16} {of_model[row][-1]}", flush=True)
    write_result(
        path,
        {
            **result_head(NAME, "Engines", before, repetitions),
            "clients": NUM_CLIENTS,
            "models": {model: sum(sizes_of(hidden)) for model, hidden in MODELS.items()},
            "metrics": {
                model: {row: _summary(runs) for row, runs in of_model.items()} for model, of_model in found.items()
            },
        },
    )


def _summary(runs: list[Result]) -> Result:
    metrics = ("round_s", "first_round_s", "whole_s", "loopback_bytes")
    return {
        **{name: dispersion([each[name] for each in runs]) for name in metrics},
        "payload_bytes": runs[0]["payload_bytes"],
        "loss": runs[0]["loss"],
    }


if __name__ == "__main__":
    _row, _model = sys.argv[1:]
    _run: Callable[..., Result] = run_floor if _row in FLOORS else run_engine
    with tempfile.TemporaryDirectory() as _root:
        _found = _run(_row, MODELS[_model], Path(_root))
    print(json.dumps(_found))
