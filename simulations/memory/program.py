"""What a process takes before it makes a model: modules, libraries, and the data.

Of this process, that is what it has now.  Of one that will train, it is what another one has that imports the same:
`bytes_of_another` starts it, and `main` is what it does.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from clients.trainer import make_optimizer
from clients.workers.shared_data import TrainingProcesses, workload_from
from fedsign.errors import ConfigError
from fedsign.optim.base import PartTrainer
from fedsign.transport.connection import Connection
from fedsign.workload import Workload

# Measured on the CPU with glibc (benchmarks/alone/memory.py).
_KERNELS = 50_000_000  # bytes that libraries map and allocate in the first step
_IMPORTERS = frozenset({"peft", "torchvision", "transformers"})


def bytes_of_this(optimizer: torch.optim.Optimizer, of_meta: int) -> int:
    """What this process has now, but for what only an account imports, and what libraries take in the first step."""
    # torch's own optimizers are stepped without that import (fedsign.optim.lean); these libraries need it, too
    is_lean = type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    is_imported = not is_lean or not _IMPORTERS.isdisjoint(sys.modules)
    return _resident() - of_meta * (not is_imported) + _KERNELS


def import_meta() -> int:
    """Import what operators on the meta device, and wrapped optimizers, import; return its bytes."""
    before = _resident()
    importlib.import_module("torch._dynamo")
    return _resident() - before


def bytes_of_another(workload: Workload, module: str, *, outlines: bool) -> int:
    """What a training process that runs `module` has; if it `outlines`, its model is made on the meta device.

    Raises:
        ConfigError: there is no such process.
    """
    there = Workload(workload.config)  # whose data are shared, not those of the run
    vars(there)["dataset"] = workload.dataset
    model = there.make_outline()  # for sizes only
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "logs"
        processes = TrainingProcesses(there, "simulations.memory.program", name="account", logs=logs, model=model)
        child = processes.start(0, device=str(workload.device), environment={}, module=module, outlines=outlines)
        answer = child.connection.receive()
        processes.close([child])
    if answer is None:
        raise ConfigError(f"a process that imports {module}, whose memory was to be measured, ended; try it again.")
    return int(answer["bytes"])


def main(parent: Connection) -> None:
    """Import and make what a training process does, and tell its size."""
    given = next(iter(parent))
    importlib.import_module(given["module"])
    workload = workload_from(given)
    of_meta = 0 if given["outlines"] else import_meta()
    optimizer = make_optimizer(workload, workload.make_outline(), round=1)
    if given["outlines"] and isinstance(optimizer, PartTrainer):
        import_meta()  # whose `zero_grad` is torch's wrapped one
    found = _resident() + _KERNELS if given["outlines"] else bytes_of_this(optimizer, of_meta)
    parent.send({"bytes": found})


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
