"""Every test leaves the process as it found it, and `tiny`, an experiment of a fraction of a second."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsign.flower  # noqa: F401 - sets FLWR_TELEMETRY_ENABLED, once for all tests

# pytest names the test in the environment; scikit-learn, torch, gRPC and Ray set variables when they are first imported.
_SET_BY_OTHERS = ("PYTEST_", "GRPC_", "KMP_", "RAY_", "TORCHINDUCTOR_")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_OTHERS)}


def _left_running(before: set[threading.Thread]) -> set[str]:
    """The names of new threads; those of a library's pool that nobody holds any more end once it is collected (`transformers`)."""
    new = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    if new:
        gc.collect()
    for thread in new:
        thread.join(timeout=2)
    return {thread.name for thread in new if thread.is_alive()}


@pytest.fixture(autouse=True)
def _nothing_leaks_into_the_next_test() -> Iterator[None]:
    """Restore, then complain.  `sys.path` is only restored: resolving a user's module may extend it."""
    environment, folder, path = _environment(), Path.cwd(), list(sys.path)
    num_threads, threads = torch.get_num_threads(), set(threading.enumerate())
    yield
    sys.path[:] = path
    left = {
        "environment": _environment().items() ^ environment.items(),
        "current folder": {Path.cwd()} - {folder},
        "torch threads": {torch.get_num_threads()} - {num_threads},
        "threads": _left_running(threads),
    }
    os.chdir(folder)
    torch.set_num_threads(num_threads)
    for name in _environment().keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    assert not any(left.values()), f"the test leaves behind: { {what: this for what, this in left.items() if this} }"


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    """Changes to the default experiment that make it very fast, for `fedsign.config.from_dict`."""
    return {
        "rounds": 2,
        "callbacks": [],
        "partition": {"num_clients": 4, "alpha": 1.0},
        "client": {"local_epochs": 1},
        "server": {"cohort_size": 2},
        "results": {"root": str(tmp_path / "runs")},
    }
