"""Four ways to run, the same bits: in process, with workers, Ray actors, SuperNode processes over HTTP.

All but the how-to's strategy train what an engine could treat in its own way: see `tests/e2e/unusual.py`.  Of three
clients, two or three share a process.
"""

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
    "in_process": {},
    "workers": {"engine__workers": 2},
    "ray": {"engine__name": "ray", "engine__init_args__num_cpus": 2},
    "superlink": {"engine__name": "superlink", "engine__num_supernodes": 2},
}
NEEDS = {"in_process": [], "workers": ["workers"], "ray": ["ray"], "superlink": ["deployment"]}
OWN = "anchored:Anchored"  # the user's own, whose penalty knows no complex weights
STRATEGIES = ("fedavg", "fedprox", "feddyn", "fedsign", "scaffold", OWN)
PAIRS = [
    pytest.param(strategy, engine, marks=pytest.mark.needs(*needed))
    for engine, needed, strategies in (
        ("in_process", [], ("feddyn",)),
        ("workers", ["workers"], STRATEGIES),
        ("superlink", [], ("fedsign", "scaffold", OWN)),  # FedDyn: below, killed
        ("cluster", ["ray"], ("scaffold", OWN)),
    )
    for strategy in strategies
]
PAUSE_S = "UNUSUAL_PAUSE_S"  # for each sample
NUM_CLIENTS = 3
ROUNDS = 5
UNUSUAL = settings(
    data__name="unusual:data",
    model__name="unusual:model",
    model__output="logits",
    client__loss="model",
    server__counters="summed",
)
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-strategy.md"
WORKERS = pytest.param("workers", marks=pytest.mark.needs("workers"))
SMALL = settings(
    rounds=ROUNDS,
    partition__num_clients=NUM_CLIENTS,
    partition__alpha=1.0,
    server__cohort_size=NUM_CLIENTS,
    callbacks=[],
    results__checkpoint_every=1,
)


def own_strategy() -> str:
    """The file that the how-to shows, before the check of its gradient."""
    source, *_ = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(source)


def choice(strategy: str, root: Path, **engine: object) -> list[str]:
    """The settings of a run, of the unusual model where its file is."""
    has_model = strategy != OWN and (root.parent / "unusual.py").exists()
    return [*SMALL, *(UNUSUAL if has_model else []), *settings(strategy__name=strategy, results__root=root, **engine)]


def hashes_of_run(folder: Path, strategy: str, **engine: object) -> dict[str, str]:
    """Run it and return the hashes of all that should not depend on the engine."""
    root = folder / f"{strategy.replace(':', '-')}-{uuid.uuid4().hex[:6]}"
    done = fedsign("run", *choice(strategy, root, **engine), folder=folder)
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
    """A folder that holds nothing but the user's own files."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copy(Path(__file__).with_name("unusual.py"), folder)
    (folder / "anchored.py").write_text(own_strategy(), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, user_folder: Path) -> tuple[str, dict[str, str]]:
    """A strategy and its hashes in process."""
    return request.param, hashes_of_run(user_folder, request.param)


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(("reference", "engine"), PAIRS, indirect=["reference"])
def test_an_engine_gives_the_bits_of_the_run_in_process(
    user_folder: Path,
    reference: tuple[str, dict[str, str]],
    engine: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Ray cluster that is there stays; the app travels to it, the user's own strategy and objective included."""
    monkeypatch.setenv(PAUSE_S, "0.002")  # or an engine's threads would find no time to disturb a client
    strategy, expected = reference
    has_client_state = any(name.startswith("state of client") for name in expected)
    assert has_client_state == (strategy in {"feddyn", "scaffold", OWN})
    if engine == "cluster":
        address = request.getfixturevalue("cluster")
        assert hashes_of_run(user_folder, strategy, engine__name="ray", engine__address=address) == expected
        assert _listens(address)
    else:
        assert hashes_of_run(user_folder, strategy, **ENGINES[engine]) == expected


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
@pytest.mark.parametrize("reference", ["flower_fedavg"], indirect=True)
def test_flowers_own_strategy_gives_the_same_bits_on_ray(
    user_folder: Path, reference: tuple[str, dict[str, str]], cluster: str
) -> None:
    strategy, expected = reference
    assert hashes_of_run(user_folder, strategy, engine__name="ray", engine__address=cluster) == expected


def test_the_strategy_of_the_how_to_fits_on_one_page() -> None:
    assert len(own_strategy().splitlines()) <= 60


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize("reference", ["feddyn"], indirect=True)
@pytest.mark.parametrize("engine", [pytest.param(name, marks=pytest.mark.needs(*NEEDS[name])) for name in ENGINES])
def test_a_killed_run_leaves_no_process_and_resumes_to_the_same_bits(
    user_folder: Path, reference: tuple[str, dict[str, str]], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the command in round 2 or later: the engine's processes end, and others find what clients keep."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # is ignored: a run joins the cluster of engine.address alone
    strategy, expected = reference
    root = user_folder / f"killed-{engine}"
    command = [sys.executable, "-m", "simulations.cli", "run", *choice(strategy, root, **ENGINES[engine])]
    mark = {"TEST_ROOT": str(root), PAUSE_S: "0.003"}
    with (user_folder / f"killed-{engine}.txt").open("w") as said:
        process = subprocess.Popen(command, cwd=user_folder, env=os.environ | mark, stdout=said, stderr=said)
    wait_until(lambda: any(path.stat().st_size for path in root.glob("*/*/rounds.jsonl")), timeout_s=240)

    def processes() -> list[str]:
        """Without Ray's agents, which end within a minute."""
        return [each for each in processes_of(root, variable="TEST_ROOT") if "Agent" not in each]

    others = len(processes()) - 1
    assert not re.search(r"[0-9a-f]{256}", "\n".join(processes())), "a token of Flower's on a command line"
    process.kill()
    process.wait()
    (folder,) = [path.parent for path in root.glob("*/*/config.toml")]
    assert len((folder / "rounds.jsonl").read_text().splitlines()) < ROUNDS
    assert (others > 0) == (engine != "in_process")  # not vacuous: there is something to end
    wait_until(lambda: not processes(), timeout_s=60)
    resumed = fedsign("run", "--resume", str(folder), folder=user_folder)
    assert resumed.returncode == 0, resumed.stderr
    assert hashes(folder) == expected


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def processes_of(root: Path, *, variable: str = "FLWR_HOME") -> list[str]:
    """Process ids and command lines of the processes that have `root` in this environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{variable}={root}".encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{process.name} {command}")
        except OSError:
            continue  # it ended meanwhile
    return found
