"""`fedsign doctor`: this machine's environment, row by row."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from fedsign.registry import KINDS, resolve


def examine() -> list[dict[str, str]]:
    """Return rows of {"what", "state", "detail"}; state is ok, missing (optional) or broken."""
    return [{"what": name, "state": state, "detail": detail} for name, state, detail in _findings()]


def _findings() -> Iterator[tuple[str, str, str]]:
    yield "python", "ok", f"{platform.python_version()} on {os.cpu_count()} cores"
    for name in ("fedsign", "torch", "flwr", "numpy"):
        yield name, "ok", importlib.metadata.version(name)
    yield "gpu", *_torch_device()
    yield "torchvision", *_torchvision()
    for name in KINDS["engine"].table:  # requirements of engines besides Flower
        requirement = getattr(resolve("engine", name), "requirement", None)
        if requirement is not None:
            yield f"engine {name}", *requirement()
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    yield "disk", "ok" if free_gb > 1 else "broken", f"{free_gb:.1f} GB free in the current folder"


def _torch_device() -> tuple[str, str]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return "ok", ", ".join(names)
    return "missing", "torch sees no CUDA device: engine.device=cpu"


def _torchvision() -> tuple[str, str]:
    from fedsign.torchvision_shim import torchvision

    try:
        return "ok", torchvision().__version__
    except (ImportError, RuntimeError) as error:
        return "broken", f"{error}; reinstall the torchvision that belongs to your torch"
