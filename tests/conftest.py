"""Test selection and distribution over cores, a check that every test cleans up its process, and `tiny`."""

import gc
import os
import subprocess
import sys
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; the processes of pytest-xdist inherit it
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch.cuda.is_available() spoils CUDA for forks otherwise
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "impatient"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import pytest

import fedsign.flower  # noqa: F401 - sets FLWR_TELEMETRY_ENABLED, once for all tests
from fedsign.capabilities import CAPABILITIES, absent

ROOT = Path(__file__).parents[1]
gc.disable()  # until the tests are collected: walking over every module that was imported takes a third of the time
os.fsync = lambda descriptor: None  # no test pulls the plug, and a run waits for the disk a dozen times


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--of-commit",
        action="store_true",
        help="one in three of each file's tests, chosen by the last commit; with --complete, one in five slow tests",
    )


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process for each core, since each computes in one thread; slow tests wait often enough for two more."""
    return len(os.sched_getaffinity(0)) + 2 * bool(config.getoption("--complete", default=False))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, unless asked for; long files go first, so that no process ends with one."""
    if not config.getoption("--complete", default=False):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if config.getoption("--of-commit", default=False):
        is_complete = config.getoption("--complete")
        if is_complete:
            slow = [item for item in items if item.get_closest_marker("slow")]
            not_chosen = _not_of_commit({None: slow}, one_in=5)
        else:
            of_file: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
            for item in items:
                of_file[item.path].append(item)
            not_chosen = _not_of_commit(of_file, one_in=3)
        config.hook.pytest_deselected(items=not_chosen)
        items[:] = [item for item in items if item not in not_chosen]
    needs = {item: {name for mark in item.iter_markers("needs") for name in mark.args} for item in items}
    deleted = {name for name in os.environ.get("FEDSIGN_WITHOUT", "").split(",") if name}  # set by tests.without
    if unknown := set().union(*needs.values()) - deleted - {*CAPABILITIES}:
        raise pytest.UsageError(f"needs({', '.join(map(repr, unknown))}): no such capability in fedsign/capabilities.")
    if deleted:
        deselected = {*Path(os.environ.get("FEDSIGN_LEFT_OUT", os.devnull)).read_text(encoding="utf-8").splitlines()}
        left_out = {
            item for item in items if needs[item] & deleted or item.nodeid in deselected or _configures_deleted(item)
        }
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    cost: Counter[Path] = Counter()  # a test that starts an engine takes some three times as long as another slow one
    for item in items:
        limit = item.get_closest_marker("timeout")  # of its own, since it takes long
        is_slow, has_engine = (bool(item.get_closest_marker(name)) for name in ("slow", "engines"))
        cost[item.path] += limit.args[0] // 120 if limit else 3 * has_engine or is_slow
    items.sort(key=lambda item: -cost[item.path])  # stable


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage in a test walks over it again."""
    gc.freeze()
    gc.enable()


def _not_of_commit(groups: Mapping[Any, list[pytest.Item]], *, one_in: int) -> set[pytest.Item]:
    """What the last commit does not choose of each group; another commit chooses others."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    dropped: set[pytest.Item] = set()
    for items in groups.values():
        chosen = sorted(items, key=lambda item: zlib.crc32(f"{commit}{item.nodeid}".encode()))
        dropped.update(chosen[-(-len(items) // one_in) :])
    return dropped


def _configures_deleted(item: pytest.Item) -> bool:
    """Whether a parameter of the test names a registry row of a deleted capability, or sets one of its keys."""
    from fedsign.config import without_deleted
    from fedsign.errors import ConfigError

    rows = {name for kinds in absent("names").values() for names in kinds.values() for name in names}
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if not rows.isdisjoint(_words(value)):
            return True
        try:
            tables = value.items() if isinstance(value, dict) else ()
            without_deleted({name: table for name, table in tables if isinstance(table, dict)})
        except ConfigError:
            return True
    return False


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.rpartition("=")[2]  # of `--set data.name=mnist` too
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _words(each)


# Set in the environment: the current test by pytest, other variables by scikit-learn, torch, gRPC and Ray on import.
_SET_BY_OTHERS = ("PYTEST_", "GRPC_", "KMP_", "RAY_", "TORCHINDUCTOR_")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_OTHERS)}


def _left_running(before: set[threading.Thread]) -> set[str]:
    """Return the names of new threads, except unreferenced library pools, which end once they are collected."""
    new = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    if new:
        gc.collect()
    for thread in new:
        thread.join(timeout=2)
    return {thread.name for thread in new if thread.is_alive()}


@pytest.fixture(autouse=True)
def _nothing_leaks_into_the_next_test() -> Iterator[None]:
    """Restore, then complain.  `sys.path` is only restored: resolving a user's module may extend it."""
    import torch  # not above, where the process that only hands out tests would wait for it

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


@pytest.fixture(autouse=True, scope="session")
def _git_is_asked_once() -> Iterator[None]:
    """For each folder, by the runs of this process."""
    from simulations import api

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_git_state", cache(api._git_state))
        yield


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
