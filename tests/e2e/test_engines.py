"""Four ways to run, the same bits: in process, with workers, Ray actors, SuperNode processes over HTTP."""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from clients.state.database import StateDatabase
from tests.e2e.checkpoints import files_of
from tests.e2e.command import fedsign, settings

ENGINES: dict[str, dict[str, object]] = {
    "workers": {"engine__workers": 2},
    "ray": {"engine__name": "ray", "engine__init_args__num_cpus": 2},
    "superlink": {"engine__name": "superlink", "engine__num_supernodes": 2},
}
WORKERS = pytest.param("workers", marks=pytest.mark.needs("workers"))
STRATEGIES = ("fedavg", "fedprox", "feddyn", "fedsign", "scaffold", "anchored:Anchored")  # the last is the user's own
PAIRS = [
    pytest.param(strategy, engine, marks=pytest.mark.needs(*needed))
    for engine, needed, strategies in (
        ("workers", ["workers"], STRATEGIES),
        ("superlink", [], ("fedsign", "scaffold", "anchored:Anchored")),  # FedDyn: below, killed
        ("cluster", ["ray"], ("scaffold", "anchored:Anchored")),
    )
    for strategy in strategies
]
NUM_CLIENTS = 3
ROUNDS = 5
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-strategy.md"
SMALL = settings(
    rounds=ROUNDS,
    partition__num_clients=NUM_CLIENTS,
    partition__alpha=1.0,
    server__cohort_size=NUM_CLIENTS,
    callbacks=[],
    results__checkpoint_every=1,
)


COUNTING = """
import torch
from torch import nn


class Counting(nn.Module):
    def __init__(self, num_outputs):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.linear = nn.Linear(64, num_outputs)

    def forward(self, features):
        if self.training:
            self.steps += 1
        return self.linear(features.flatten(1)) * (1 + 1e-3 * self.steps)


def counting(input_shape, num_outputs):
    return Counting(num_outputs)
"""


def own_strategy() -> str:
    """The file that the how-to shows, before the check of its gradient."""
    source, *_ = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(source)


def hashes_of_run(folder: Path, strategy: str, **engine: object) -> dict[str, str]:
    """Run it and return the hashes of all that should not depend on the engine."""
    root = folder / f"{strategy.replace(':', '-')}-{uuid.uuid4().hex[:6]}"
    done = fedsign("run", *SMALL, *settings(strategy__name=strategy, results__root=root, **engine), folder=folder)
    assert done.returncode == 0, done.stderr
    (config,) = root.glob("*/*/config.toml")
    return hashes(config.parent)


def hashes(run: Path) -> dict[str, str]:
    """Hash the records, the model, the last checkpoint and the last client states, in files or in a database."""
    found = {name: (run / name).read_bytes() for name in ("rounds.jsonl", "model.safetensors")}
    database = StateDatabase(run / "clients")
    for partition in range(NUM_CLIENTS):
        files = list((run / "clients").glob(f"{partition:06d}/round-{ROUNDS:06d}.safetensors"))
        state = load_file(files[0]) if files else database.read(partition, ROUNDS)
        if state is not None:
            found[f"state of client {partition}"] = save(dict(sorted(state.items())))
    database.close()
    checkpoint = files_of(run / "checkpoints" / f"round-{ROUNDS:06d}")
    del checkpoint["states"]  # some engines keep them elsewhere
    return checkpoint | {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but the user's own file."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "anchored.py").write_text(own_strategy(), encoding="utf-8")
    (folder / "counting.py").write_text(COUNTING, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, user_folder: Path) -> tuple[str, dict[str, str]]:
    """A strategy and its hashes in process."""
    return request.param, hashes_of_run(user_folder, request.param)


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(("reference", "engine"), PAIRS, indirect=["reference"])
def test_an_engine_gives_the_bits_of_the_run_in_process(
    user_folder: Path, reference: tuple[str, dict[str, str]], engine: str, request: pytest.FixtureRequest
) -> None:
    """A Ray cluster that is there stays; the app travels to it, the user's own strategy and objective included."""
    strategy, expected = reference
    has_client_state = any(name.startswith("state of client") for name in expected)
    assert has_client_state == (strategy in {"feddyn", "scaffold", "anchored:Anchored"})
    if engine == "cluster":
        address = request.getfixturevalue("cluster")
        assert hashes_of_run(user_folder, strategy, engine__name="ray", engine__address=address) == expected
        assert _listens(address)
    else:
        assert hashes_of_run(user_folder, strategy, **ENGINES[engine]) == expected


@pytest.mark.engines
@pytest.mark.slow
def test_a_counter_counts_the_same_on_every_engine(user_folder: Path) -> None:
    """The oracle of its value is in tests/contract/test_counters.py."""
    counting: dict[str, object] = {"model__name": "counting:counting", "server__counters": "summed"}
    expected = hashes_of_run(user_folder, "fedavg", **counting)
    for engine in ("ray", "superlink"):
        assert hashes_of_run(user_folder, "fedavg", **counting, **ENGINES[engine]) == expected


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", WORKERS])  # a SuperLink: below, killed
def test_a_run_that_goes_on_in_other_processes_ends_with_the_same_bits(
    user_folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds, then five with the earlier client states: the next process finds what clients keep."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # is ignored: a run joins the cluster of engine.address alone
    root = user_folder / f"resumed-{engine}"
    choice = settings(strategy__name="feddyn", results__root=root, **ENGINES[engine])
    begun = fedsign("run", *SMALL, *choice, "--set", "rounds=2", folder=user_folder)
    assert begun.returncode == 0, begun.stderr
    (config,) = root.glob("*/*/config.toml")
    resumed = fedsign("run", "--resume", str(config.parent), "--set", f"rounds={ROUNDS}", folder=user_folder)
    assert resumed.returncode == 0, resumed.stderr
    assert hashes(config.parent) == hashes_of_run(user_folder, "feddyn")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster that is there already; its processes are a group of their own, which is ended as a whole."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    program = Path(sys.executable).parent / "ray"
    options = [
        "--head",
        "--port",
        address.partition(":")[2],
        "--num-cpus",
        "2",
        "--include-dashboard",
        "false",
        "--block",
    ]
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # sockets lie in it, whose paths must be short
    head = subprocess.Popen(
        [str(program), "start", *options, "--temp-dir", str(folder)],
        cwd=folder,
        env={**os.environ, "RAY_worker_niceness": "0"},  # as FedSign starts Ray itself
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(lambda: _listens(address), timeout_s=120)
        yield address
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.needs("ray")
@pytest.mark.engines
@pytest.mark.slow
def test_flowers_own_strategy_gives_the_same_bits_on_ray(user_folder: Path, cluster: str) -> None:
    there = hashes_of_run(user_folder, "flower_fedavg", engine__name="ray", engine__address=cluster)
    assert there == hashes_of_run(user_folder, "flower_fedavg")


def test_the_strategy_of_the_how_to_fits_on_one_page() -> None:
    assert len(own_strategy().splitlines()) <= 60


@pytest.mark.needs("deployment")
@pytest.mark.engines
@pytest.mark.slow
def test_killing_a_run_on_a_superlink_leaves_no_process_and_it_resumes_to_the_same_bits(user_folder: Path) -> None:
    """kill -9 of the command in the middle of round 2 or 3: Flower's processes end, and the run goes on."""
    expected = hashes_of_run(user_folder, "feddyn")
    root = user_folder / "killed"
    choice = settings(strategy__name="feddyn", engine__name="superlink", results__root=root)
    command = [sys.executable, "-m", "simulations.cli", "run", *SMALL, *choice]
    process = subprocess.Popen(command, cwd=user_folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: any(path.stat().st_size for path in root.glob("*/*/rounds.jsonl")), timeout_s=240)
    assert processes_of(root)  # not vacuous: there is something to end
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(root), timeout_s=60)
    (config,) = root.glob("*/*/config.toml")
    resumed = fedsign("run", "--resume", str(config.parent), folder=user_folder)
    assert resumed.returncode == 0, resumed.stderr
    assert hashes(config.parent) == expected


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def processes_of(root: Path) -> list[str]:
    """Process ids and command lines of the processes whose Flower home is in `root`: all that the engine started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={root}".encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{process.name} {command}")
        except OSError:
            continue  # it ended meanwhile
    return found
