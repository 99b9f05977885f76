"""SuperLink: a local deployment of Flower's, real processes and real messages on the loopback.

Starts one SuperLink and some SuperNodes, each serving a share of the partitions, submits the generated
app, follows the lines that the ServerApp writes into the run's folder, and ends every process that it
started.  Flower's own home is a folder of the run: nothing of the user's is read or changed.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tomli_w
from pydantic import Field

from clients.deployment.settings import PARTITIONS_KEY, ROOT_KEY, SHARE_KEY, SITE_KEY
from clients.node import STATE_KEY
from fedsign.config import ExperimentConfig
from fedsign.data import sites
from fedsign.errors import EngineError
from fedsign.flower.programs import find_program
from fedsign.results import RunFolder
from fedsign.rules import Rule
from fedsign.workload import Workload
from simulations.deployment.engine import remote
from simulations.deployment.engine.submission import check_server_app, follow, submit, write_submission
from simulations.deployment.programs import (
    flower_environment,
    free_port,
    write_connection,
)
from simulations.rounds import OnRound

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.2
_NUM_SUPERNODES = 3

# Leads a program's process group and ends all of it, when asked or when this process dies (Linux tells it): Flower's
# programs wait for ever for a SuperLink that is gone when they are struck while sending.
_LEADER = """
import ctypes, os, signal, subprocess, sys, time

child = None

def end(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + 3
    while child is not None and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)

signal.signal(signal.SIGTERM, end)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    child = subprocess.Popen(sys.argv[2:])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # child.wait() would keep end() from seeing that it ended
    sys.exit(child.wait())
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where the processes of one run live."""

    logs: Path
    environment: Mapping[str, str]
    port: int

    @property
    def home(self) -> Path:
        """Flower's."""
        return Path(self.environment["FLWR_HOME"])

    @property
    def address(self) -> str:
        return f"{_LOOPBACK}:{self.port}"


class SuperLink:
    """Settings: `federation`, the folder of a federation that is up ("": one of this run's own, on this machine);
    `num_supernodes` of this run's own (with `partition.name=sites`, one for each site); `start_timeout_s`, until they have
    answered the roll call; `share_details`: let them tell tracebacks and label counts, which otherwise stay with them.
    """

    is_deployed = keeps_processes = True
    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule(
            lambda its: its.engine.federation and its.engine.num_supernodes != _NUM_SUPERNODES,
            "engine.num_supernodes={engine.num_supernodes} and engine.federation={engine.federation} were both given",
            "a federation has the SuperNodes of its sites: leave engine.num_supernodes out",
        ),
        Rule(
            lambda its: its.engine.federation and its.engine.share_details,
            "engine.share_details=true was given with engine.federation={engine.federation}, whose sites decide that",
            "start those that share with --node-config 'share-details=true', and leave engine.share_details out",
        ),
    )

    def __init__(
        self,
        *,
        num_supernodes: Annotated[int, Field(gt=0)] = _NUM_SUPERNODES,
        start_timeout_s: Annotated[float, Field(gt=0)] = 300.0,
        share_details: bool = False,
        federation: str = "",
    ) -> None:
        self.federation = federation
        self.num_supernodes = num_supernodes
        self.start_timeout_s = start_timeout_s
        self.share_details = share_details

    @staticmethod
    def requirement() -> tuple[str, str]:
        """For `fedsign doctor`."""
        try:
            return "ok", find_program("flower-superlink")
        except EngineError as error:
            return "broken", str(error)

    def check(self, workload: Workload) -> None:
        """See Engine."""
        if self.federation:
            remote.check(Path(self.federation), workload.config.partition.num_clients)

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """See Engine."""
        if self.federation:
            remote.execute(Path(self.federation), workload, folder, on_round)
            return
        num_clients = workload.config.partition.num_clients
        app = write_submission(workload.config, folder)
        place = _make_place(folder)
        with ExitStack() as stack:
            link = stack.enter_context(_process([find_program("flower-superlink"), *_link_arguments(place)], place))
            _wait_for_port(place.port, link, place, self.start_timeout_s)
            processes = {"superlink": link}
            num_nodes = num_clients if sites.has_sites(workload.config) else min(self.num_supernodes, num_clients)
            for index in range(num_nodes):
                name = f"supernode-{index}"
                own = self._node_config(workload.config, list(range(index, num_clients, num_nodes)), folder)
                command = [sys.executable, "-P", "-m", "clients.site", *_node_arguments(place, own)]
                processes[name] = stack.enter_context(_process(command, place, name))
            run_id = submit(app, place.environment, logs=place.logs)
            follow(folder, on_round, lambda: _check_alive(processes, run_id, place, folder))

    def _node_config(self, config: ExperimentConfig, partitions: list[int], folder: RunFolder) -> dict[str, Any]:
        """What a SuperNode is told beside the experiment; a site's folder is told to its own alone."""
        own: dict[str, Any] = {
            PARTITIONS_KEY: ",".join(map(str, partitions)),
            STATE_KEY: str(folder.clients.resolve()),
            SHARE_KEY: self.share_details,
        }
        if sites.has_sites(config):
            (site,) = partitions
            own |= {ROOT_KEY: _absolute(sites.root_of(config, site)), SITE_KEY: sites.name_of(config, site)}
        return own


def _make_place(folder: RunFolder) -> _Place:
    home, logs = (folder.path / "flower").resolve(), folder.path / "logs"
    for path in (home, logs):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    place = _Place(logs=logs, environment=flower_environment(home), port=free_port())
    write_connection(home, place.address, authority=None)
    return place


def _link_arguments(place: _Place) -> list[str]:
    return [
        "--insecure", "--host", _LOOPBACK, "--port", str(place.port), "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def _node_arguments(place: _Place, own: Mapping[str, Any]) -> list[str]:
    """`own` goes through a file, since a path may hold any character."""
    config = place.home / f"node-{uuid.uuid4().hex[:8]}.toml"
    config.write_text(tomli_w.dumps(own), encoding="utf-8")
    return [
        "--insecure", "--superlink", place.address, "--host", _LOOPBACK, "--port", str(free_port()),
        "--node-config", str(config),
    ]  # fmt: skip


def _absolute(root: str) -> str:
    return str(Path(root).expanduser().resolve()) if root else ""


@contextmanager
def _process(command: list[str], place: _Place, name: str = "superlink") -> Iterator["subprocess.Popen[bytes]"]:
    """Start a program in a process group of its own, and end the whole group."""
    with (place.logs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _LEADER, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(place.environment),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ask the group to end, then insist."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _check_alive(
    processes: Mapping[str, "subprocess.Popen[bytes]"], run_id: str, place: _Place, folder: RunFolder
) -> None:
    """Raise EngineError when a process has ended, or the ServerApp without saying how."""
    for name, process in processes.items():
        if process.poll() is not None:
            raise EngineError(f"the process {name} ended in the middle of the run; see {place.logs / name}.log.")
    check_server_app(run_id, place.environment, folder, where=f"see {place.logs}")


def _wait_for_port(port: int, process: "subprocess.Popen[bytes]", place: _Place, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log = (place.logs / "superlink.log").read_text(encoding="utf-8", errors="replace").strip()
            raise EngineError(f"the SuperLink ended at once: {log[-500:]}")
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((_LOOPBACK, port)) == 0:
                return
        time.sleep(_POLL_S)
    raise EngineError(f"the SuperLink did not answer within {timeout_s:g} s; see {place.logs}.")
