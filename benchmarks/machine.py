"""The machine of a measurement."""

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.task import Task
from simulations.api import environment

_SIDE = 1024


def machine() -> dict[str, Any]:
    """Describe processor, memory, device, versions, and current load."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
        "git": environment()["git"],
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("fedsign", "torch", "flwr", "numpy")},
        },
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def arithmetic(task: Task) -> dict[str, float]:
    """Measure the floating-point operations of a mean round, and the rate of a large matrix product on one thread.

    Their quotient is a lower bound for any program on one core, or on the GPU, since large matrix products reach the
    best rate.
    """
    network = task.make_network().train()
    features, targets = task.train
    size = min(task.batch_size, len(features))
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(network(features[:size]), targets[:size]).backward()
    per_sample = counter.get_total_flops() / size
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(features[:size])
    evaluated = counter.get_total_flops() / size * len(task.test[1])
    starts = task.arrays["starts"]
    clients = [client for round in range(1, task.rounds + 1) for client in task.cohort(round)]
    samples = sum(int(starts[client + 1] - starts[client]) for client in clients) / task.rounds
    flops = per_sample * samples * task.epochs + evaluated
    rate = _rate(task.device)
    return {"flops_per_round": flops, "flops_per_s": rate, "s_per_round": flops / rate}


def _rate(device: torch.device) -> float:
    """Return the best rate of ten products of two square float32 matrices."""
    square = torch.randn(_SIDE, _SIDE, device=device, generator=torch.Generator(device).manual_seed(0))
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        product = square @ square
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    del product
    return 2 * _SIDE**3 / best


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
