"""`fedsign new`: the project trains, passes its test, and is a Flower app whose results are those of `fedsign run`."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from flwr.app import Context, Message, RecordDict

from fedsign.errors import ConfigError
from fedsign.flower.in_process import InProcessGrid
from simulations.projects.creation import create
from simulations.projects.flower import ProjectNode, client_app, server_app
from tests.e2e.command import fedsign

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
NAME = "my-Project2"
QUICK = ["--set", "rounds=2"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new project, which is the current folder."""
    folder = create(tmp_path / NAME)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_project2"]:
        del sys.modules[name]


def records_of(project: Path) -> list[str]:
    return [path.read_text() for path in sorted(project.glob("runs/*/*/rounds.jsonl"))]


def in_project(project: Path, *command: str, timeout_s: float = 300, **environment: str) -> str:
    """What a program prints that has to succeed, started in the project."""
    own = {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-p no:cacheprovider", **environment}
    done = subprocess.run(
        command, cwd=project, env={**os.environ, **own}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_makes_a_project_and_prints_what_comes_next(tmp_path: Path) -> None:
    made = fedsign("new", NAME, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    assert [line.split("  #")[0].strip() for line in made.stdout.splitlines()[2:]] == [
        f"cd {NAME}",
        "fedsign run experiment.toml",
        "python -m pytest",
        "flwr run . --stream",
    ]
    files = {str(path.relative_to(tmp_path / NAME)) for path in (tmp_path / NAME).rglob("*") if path.is_file()}
    assert {"experiment.toml", ".gitignore", "my_project2/strategy.py", "tests/test_my_project2.py"} <= files
    assert not [name for name in files if "jinja" in name or "PACKAGE" in name]
    tree = tomllib.loads((tmp_path / NAME / "pyproject.toml").read_text())
    assert tree["tool"]["flwr"]["app"]["config"]["results"] == str(tmp_path / NAME / "runs")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("taken", "exists already"),
        ("dangling", "exists already"),
        ("a b", "the name of a project"),
        ("2nd", "the name of a project"),
        ("x" * 33, "the name of a project"),
        ("..", "the name of a project"),
        ("torch", "Python knows that as a module"),
        ("Strategies", "Python knows that as a module"),
        ("json", "Python knows that as a module"),
        ("Class", "Python knows that as a keyword"),
    ],
)
def test_a_project_is_not_made_over_something_or_under_a_name_that_is_taken(
    name: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=expected):
        create(tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


def test_a_new_project_trains_and_passes_its_own_test(project: Path) -> None:
    done = fedsign("run", "experiment.toml", folder=project)
    assert done.returncode == 0, done.stderr
    (run,) = (project / "runs" / NAME).iterdir()
    assert float(done.stdout.split()[1]) > 0.8, "chance is 0.5"
    assert (run / "report.html").exists()
    assert "3 passed" in in_project(project, sys.executable, "-m", "pytest", "-q")


def test_a_project_is_formatted_and_has_no_unused_import(project: Path) -> None:
    pytest.importorskip("ruff", reason="ruff is not installed")
    in_project(project, sys.executable, "-m", "ruff", "check", "--line-length=120", "--select=E,F,I,B,UP", ".")
    in_project(project, sys.executable, "-m", "ruff", "format", "--line-length=120", "--check", ".")


# --- the Flower app


def context(node: int, num_nodes: int, **run_config: str) -> Context:
    node_config: dict[str, Any] = {"partition-id": node, "num-partitions": num_nodes}
    return Context(run_id=1, node_id=node, node_config=node_config, state=RecordDict(), run_config={**run_config})


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 10, 12])
def test_the_clients_are_dealt_to_any_number_of_nodes(num_nodes: int, project: Path) -> None:
    nodes = [ProjectNode(context(node, num_nodes), project / "experiment.toml") for node in range(num_nodes)]
    dealt = [partition for node in nodes for partition in node.partitions]
    assert sorted(dealt) == list(range(max(10, num_nodes)))
    assert all(node.partitions for node in nodes)


def test_a_supernode_without_a_number_is_refused(project: Path) -> None:
    own = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(ConfigError, match="start it with --node-config"):
        _ = ProjectNode(own, project / "experiment.toml").partitions


def _bound(unused: socket.socket) -> int:
    unused.bind(("127.0.0.1", 0))
    return int(unused.getsockname()[1])


@contextmanager
def local_superlink(folder: Path) -> Iterator[dict[str, str]]:
    """The SuperLink that `flwr run` would start, with a home of the test's own; yields Flower's variables for it.

    Flower gives it 15 s to start, which is too little on a busy machine.
    """
    with socket.socket() as one, socket.socket() as other:
        port, control = (str(_bound(each)) for each in (one, other))
    environment = {
        "FLWR_HOME": str(folder),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port,
        "FLWR_LOCAL_CONTROL_API_PORT": control,
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": os.pathsep.join([str(BIN), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
    }
    address = ["--control-api-address", f"127.0.0.1:{control}", "--host", "127.0.0.1", "--port", port]
    command = [str(BIN / "flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess", *address]
    link = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 180
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert link.poll() is None and time.monotonic() < deadline, "the SuperLink does not answer"
            time.sleep(0.2)
        yield environment
    finally:
        started = [*psutil.Process(link.pid).children(recursive=True), psutil.Process(link.pid)]
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(started, timeout=30)
        for process in alive:
            process.kill()
        link.wait(timeout=30)


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def test_the_app_has_the_records_of_fedsign_run(project: Path) -> None:
    """Server and clients in this process, over messages, on two nodes."""
    path = project / "experiment.toml"
    assert fedsign("run", str(path), *QUICK, folder=project).returncode == 0
    (expected,) = records_of(project)
    client, run_config = client_app(path), {"results": str(project / "flower"), "set": "rounds=2"}

    def handle(messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            yield client(message, context(message.metadata.dst_node_id, 2, **run_config))

    server_app(path)(InProcessGrid(2, handle), context(0, 2, **run_config))
    (found,) = project.glob(f"flower/{NAME}/*/rounds.jsonl")
    assert found.read_text() == expected


def test_the_engine_of_the_app_is_refused_outside_of_it(project: Path) -> None:
    refused = fedsign(
        "run", "experiment.toml", "--set", "engine.name=simulations.projects.flower:FlowerGrid", folder=project
    )
    assert refused.returncode == 2 and "use 'flwr run'" in refused.stderr


@pytest.mark.needs("ray")
@pytest.mark.slow
@pytest.mark.engines
def test_flwr_run_has_the_records_of_fedsign_run(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    assert fedsign("run", "experiment.toml", *QUICK, folder=project).returncode == 0
    with local_superlink(tmp_path / "home") as environment:
        said = in_project(
            project, str(BIN / "flwr"), "run", ".", "--stream", "--run-config", 'set="rounds=2"', **environment
        )
    assert "round 2/2" in said
    first, second = records_of(project)
    assert first == second


# --- the notebook


@pytest.mark.slow
def test_the_notebook_runs_and_compares_with_fedavg(project: Path) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    notebook = nbformat.read(project / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(project)}}
    asyncio.run(nbclient.NotebookClient(notebook, timeout=300, resources=resources).async_execute())
    first, table, model = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert "fedsign-card" in first[-1].data["text/html"]
    assert "accuracy of FedAvg" in table[-1].data["text/plain"]
    assert "Linear" in model[-1].data["text/plain"]
    assert len(records_of(project)) == 2
