"""Runs that a SuperLink plays: submitted as by `flwr run`, followed by the lines that the ServerApp writes into the run's folder."""

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from clients.deployment.node import RUN_KEY, SuperNode
from fedsign import errors
from fedsign.config import ExperimentConfig
from fedsign.data.sites import lies_at_nodes
from fedsign.errors import EngineError, FedSignError
from fedsign.storage.disk import write_text
from fedsign.storage.results import Line, RunFolder
from simulations.deployment.engine.server_app import FOLDER_KEY, FOLLOWER_KEY, OUTCOME, WORKING_KEY
from simulations.flower_app import write_app
from simulations.rounds import OnRound

_SERVER_APP = "simulations.deployment.engine.server_app:app"
_POLL_S = 0.2
_STATUS_EVERY_S = 15.0


def write_submission(config: ExperimentConfig, folder: RunFolder, *, followed_by: int | None = None) -> Path:
    """Write the app of a run into its folder; `followed_by`: the process that the ServerApp does not outlive."""
    (folder.path / OUTCOME).unlink(missing_ok=True)
    told = {FOLDER_KEY: str(folder.path.resolve()), RUN_KEY: _name_of(folder)}
    if followed_by is not None:
        told |= {FOLLOWER_KEY: str(followed_by), WORKING_KEY: str(Path.cwd())}
    if lies_at_nodes(config):
        config = config.replace(**{"partition.roots": []})  # where other sites' data lie is not for a node to know
    return write_app(folder.path / "app", config, run_config=told, node=SuperNode, server_app=_SERVER_APP)


def _name_of(folder: RunFolder) -> str:
    """What nodes call a run: the same whenever it is resumed, and no other run's."""
    path = folder.path / "name"
    if not path.exists():
        write_text(path, f"{folder.path.resolve().name}-{uuid.uuid4().hex[:12]}")
    return path.read_text(encoding="utf-8")


def submit(app: Path, link: ControlHttpClient) -> int:
    """As `flwr run` does; returns the run's id."""
    content = build_fab_from_disk(app)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    return link.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id


def check_server_app(run_id: int, link: ControlHttpClient, folder: RunFolder, *, where: str) -> None:
    """Raise EngineError when the ServerApp has ended without saying how; `where` is what may be read about it."""
    status = link.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
    if status.status == Status.FINISHED and not (folder.path / OUTCOME).exists():
        raise EngineError(
            f"the ServerApp ended without a result (Flower says '{status.status}:{status.sub_status}'); {where}."
        )


def follow(folder: RunFolder, on_round: OnRound, check_alive: Callable[[], None]) -> None:
    """Hand on the lines as they are written, until the ServerApp says how it ended."""
    num_seen = len(folder.rounds())
    heard_at = time.monotonic()
    while True:
        outcome = folder.path / OUTCOME
        ended = outcome.exists()  # asked before the lines are read: none can follow
        for line in folder.rounds()[num_seen:]:
            on_round(line)
            num_seen += 1
            heard_at = time.monotonic()
        if ended:
            _raise_failure(json.loads(outcome.read_text(encoding="utf-8")))
            return
        if time.monotonic() - heard_at > _STATUS_EVERY_S:
            check_alive()
            heard_at = time.monotonic()
        time.sleep(_POLL_S)


def _raise_failure(outcome: Line) -> None:
    """The ServerApp's error, in the kind in which it was raised there."""
    if outcome["status"] == "finished":
        return
    kind = getattr(errors, outcome["kind"], EngineError)
    raise (kind if isinstance(kind, type) and issubclass(kind, FedSignError) else EngineError)(outcome["error"])
