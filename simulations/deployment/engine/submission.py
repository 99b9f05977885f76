"""Runs that a SuperLink plays: submitted as by `flwr run`, followed by the lines that the ServerApp writes into the run's folder."""

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from clients.deployment.node import RUN_KEY, SuperNode
from fedsign import errors
from fedsign.config import ExperimentConfig
from fedsign.data.sites import lies_at_nodes
from fedsign.errors import EngineError
from fedsign.storage.disk import write_text
from fedsign.storage.results import RunFolder, read_json
from simulations.deployment.engine.hooks import SUPERLINK
from simulations.deployment.engine.server_app import (
    FOLDER_KEY,
    FOLLOWER_KEY,
    OUTCOME,
    PID,
    SUBMISSION,
    SUBMISSION_KEY,
    WORKING_KEY,
)
from simulations.deployment.running import end, recorded
from simulations.flower_app import write_app
from simulations.rounds import OnRound

_SERVER_APP = "simulations.deployment.engine.server_app:app"
_POLL_S = 0.2
_STATUS_EVERY_S, _LOOKS_EVERY_S = 15.0, 1.0
_log = logging.getLogger("fedsign")


def play(
    config: ExperimentConfig,
    folder: RunFolder,
    on_round: OnRound,
    *,
    link: ControlHttpClient,
    check_alive: Callable[[], None],
) -> None:
    """Submit a run to a SuperLink, and follow it to its end.

    Raises:
        EngineError: the SuperLink refuses, or ends in the middle of the run, as `check_alive` says.
    """
    outcome, num_seen, num_told = folder.path / OUTCOME, len(folder.rounds()), len(folder.records("members.jsonl"))
    app = write_submission(config, folder)
    end_server_app(folder)
    run_id = submit(app, link)
    heard_at = looked_at = time.monotonic()
    read = 0  # bytes of the records
    try:
        while True:
            has_ended = outcome.exists()  # asked before the lines are read: none can follow
            num_told = tell_events(folder, num_told)
            if (size := size_of(folder.path / "rounds.jsonl")) != read:
                for line in folder.rounds()[num_seen:]:
                    on_round(line)
                    num_seen, heard_at = num_seen + 1, time.monotonic()
                read = size
            if has_ended:
                break
            if time.monotonic() - looked_at > _LOOKS_EVERY_S:
                check_alive()
                looked_at = time.monotonic()
            if time.monotonic() - heard_at > _STATUS_EVERY_S:
                heard_at = time.monotonic()
                status = link.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
                if status.status == Status.FINISHED and not outcome.exists():
                    raise EngineError(
                        f"the ServerApp ended without a result (Flower says '{status.status}:{status.sub_status}'); "
                        "what it printed is with the SuperLink's output."
                    )
            time.sleep(_POLL_S)
    except BaseException:
        with suppress(httpx.HTTPError):  # without this process, the ServerApp ends anyway
            link.StopRun(StopRunRequest(run_id=run_id))
        raise
    ended = read_json(outcome)
    if ended["status"] != "finished":
        check_alive()  # the ServerApp may have noticed first
        raise getattr(errors, ended["kind"], EngineError)(ended["error"])  # in the kind in which it was raised there


def tell_events(folder: RunFolder, num_told: int) -> int:
    """Say what has happened to the sites since; returns how many lines of members.jsonl have been told."""
    events = folder.records("members.jsonl")
    for event in events[num_told:]:
        who = "the SuperLink" if event["site"] == SUPERLINK else f"site {event['site']}"
        _log.warning("round %d: %s %s: %s", event["round"], who, event["event"], event["why"])
    return len(events)


def size_of(path: Path) -> int:
    """In bytes; 0 where nothing is there yet."""
    return path.stat().st_size if path.exists() else 0


def end_server_app(folder: RunFolder) -> None:
    """End what may be left of one that writes into this folder; it ends by itself when its SuperLink or its command does, a moment later.

    One that an earlier submission will still start, ends when it sees that there is a newer one: it writes its process id down first.
    """
    process = recorded(folder.path / PID)
    end([process] if process is not None else [])


def write_submission(config: ExperimentConfig, folder: RunFolder) -> Path:
    """Write the app of a run into its folder; the ServerApp does not outlive this process."""
    (folder.path / OUTCOME).unlink(missing_ok=True)
    told = {
        FOLDER_KEY: str(folder.path.resolve()),
        RUN_KEY: _name_of(folder),
        FOLLOWER_KEY: str(os.getpid()),
        WORKING_KEY: str(Path.cwd()),
        SUBMISSION_KEY: uuid.uuid4().hex,
    }
    write_text(folder.path / SUBMISSION, told[SUBMISSION_KEY])
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
