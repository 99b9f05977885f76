"""`fedsign doctor`: what this machine has, row by row."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from fedsign.registry import KINDS, resolve

Row = dict[str, str]


def examine() -> list[Row]:
    """Rows of {"what", "state", "detail"}; state is ok, missing (an option) or broken."""
    return [_python(), *_packages(), _torch_device(), _torchvision(), *_engines(), _disk()]


def _python() -> Row:
    return _row("python", "ok", f"{platform.python_version()} on {os.cpu_count()} cores")


def _packages() -> list[Row]:
    return [_row(name, "ok", importlib.metadata.version(name)) for name in ("fedsign", "torch", "flwr", "numpy")]


def _torch_device() -> Row:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return _row("gpu", "ok", ", ".join(names))
    return _row("gpu", "missing", "torch sees no CUDA device: engine.device=cpu")


def _torchvision() -> Row:
    from fedsign.torchvision_shim import torchvision

    try:
        return _row("torchvision", "ok", torchvision().__version__)
    except (ImportError, RuntimeError) as error:
        return _row("torchvision", "broken", f"{error}; reinstall the torchvision that belongs to your torch")


def _engines() -> Iterator[Row]:
    """What engines need besides Flower."""
    for name in KINDS["engine"].table:
        requirement = getattr(resolve("engine", name), "requirement", None)
        if requirement is not None:
            yield _row(f"engine {name}", *requirement())


def _disk() -> Row:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    state = "ok" if free_gb > 1 else "broken"
    return _row("disk", state, f"{free_gb:.1f} GB free in the current folder")


def _row(what: str, state: str, detail: str) -> Row:
    return {"what": what, "state": state, "detail": detail}
