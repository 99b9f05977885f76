"""Execute a run on a SuperLink: submit it as `flwr run` does, then follow the records in the run's folder."""

import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import Status
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from clients.deployment.node import SuperNode
from clients.node import RUN_KEY
from fedsign import errors
from fedsign.config import ExperimentConfig
from fedsign.data.sites import lies_at_nodes
from fedsign.errors import EngineError
from fedsign.storage.digests import sealed_json
from fedsign.storage.disk import write_text
from fedsign.storage.results import RunFolder, read_json
from simulations import signals
from simulations.deployment.engine.hooks import SUPERLINK
from simulations.deployment.engine.server_app import (
    OUTCOME,
    PID,
    SUBMISSION_KEY,
    submission_of,
)
from simulations.deployment.keys import write_secret
from simulations.deployment.refusals import STRANGERS
from simulations.deployment.running import end, recorded
from simulations.flower_app import write_app
from simulations.rounds import OnRound

_SERVER_APP = "simulations.deployment.engine.server_app:app"
_POLL_S = 0.2
# a status is a request to the SuperLink, a look only reads a pid file
_STATUS_EVERY_S, _POLL_INTERVAL_S = 15.0, 1.0
_log = logging.getLogger("fedsign")


@signals.whole_rounds()
def submit_and_follow(
    config: ExperimentConfig,
    folder: RunFolder,
    on_round: OnRound,
    *,
    link: ControlHttpClient,
    home: Path,
    check_alive: Callable[[], None],
) -> None:
    """Submit a run to a SuperLink, whose Flower home is `home`, and follow it to its end.

    On a signal, that is the end of its round.

    Raises:
        EngineError: the SuperLink refuses the run, or stops during it according to `check_alive`.
    """
    outcome, num_seen, num_events = folder.path / OUTCOME, len(folder.rounds()), len(folder.records("members.jsonl"))
    app = write_submission(config, folder, home)
    # After the submission is written: a ServerApp that is still starting then sees that it is outdated.
    end_server_app(folder)
    run_id = submit(app, link)
    heard_at = looked_at = time.monotonic()
    read, is_told = 0, False  # bytes of rounds.jsonl; whether the ServerApp knows of a signal
    try:
        while True:
            if signals.received and not is_told:
                _tell_to_leave(folder)
                is_told = True
            has_ended = outcome.exists()  # checked before reading: no records can follow
            # before the rounds: what happened to sites in a round belongs above its line
            num_events = tell_events(folder, num_events)
            # the size is one system call; reading thousands of records five times a second would load the disk
            if (size := size_of(folder.path / "rounds.jsonl")) != read:
                for line in folder.rounds()[num_seen:]:
                    on_round(line)
                    num_seen, heard_at = num_seen + 1, time.monotonic()
                read = size
            if has_ended:
                break
            if time.monotonic() - looked_at > _POLL_INTERVAL_S:
                check_alive()
                looked_at = time.monotonic()
            # Asked only when no record has come for a while: the ServerApp may have died without writing its outcome.
            if time.monotonic() - heard_at > _STATUS_EVERY_S:
                heard_at = time.monotonic()
                status = link.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
                # the second look: the ServerApp may have written it since the first
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
    finally:
        submission_of(home, _name_of(folder)).unlink(missing_ok=True)
    ended = read_json(outcome)
    if ended["status"] != "finished":
        check_alive()  # the ServerApp may be the first to notice
        raise getattr(errors, ended["kind"], EngineError)(ended["error"])  # as the class that was raised there


def _tell_to_leave(folder: RunFolder) -> None:
    process = recorded(folder.path / PID)
    if process is None:  # it has not started
        raise signals.Ended
    process.terminate()


def tell_events(folder: RunFolder, num_events: int) -> int:
    """Report new events of the sites; return the number of records of members.jsonl reported so far."""
    events = folder.records("members.jsonl")
    for event in events[num_events:]:
        source = {SUPERLINK: "the SuperLink", STRANGERS: STRANGERS}.get(event["site"], f"site {event['site']}")
        _log.warning("round %d: %s %s: %s", event["round"], source, event["event"], event["why"])
    return len(events)


def size_of(path: Path) -> int:
    """Return a file's size in bytes; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def end_server_app(folder: RunFolder) -> None:
    """End a ServerApp that still writes to this folder. It would end by itself shortly after its SuperLink or command.

    A ServerApp that an earlier submission has yet to start will see the newer submission, since it first writes its
    process id.
    """
    process = recorded(folder.path / PID)
    end([process] if process is not None else [], patience_s=0)  # it would finish its round first


def write_submission(config: ExperimentConfig, folder: RunFolder, home: Path) -> Path:
    """Write the run's app into its folder, and what sites must not learn below Flower's home.

    The ServerApp does not outlive this process.
    """
    # an earlier submission's outcome would end this one at once
    (folder.path / OUTCOME).unlink(missing_ok=True)
    if lies_at_nodes(config):
        config = config.replace(**{"partition.roots": []})  # nodes must not learn where other sites' data are
    name, id = _name_of(folder), uuid.uuid4().hex
    own = {
        "id": id,
        "folder": str(folder.path.resolve()),
        "working_folder": str(Path.cwd()),
        "followed_by": os.getpid(),
        "experiment": config.to_toml(),
    }
    write_secret(submission_of(home, name), sealed_json(own).encode())
    run_config = {RUN_KEY: name, SUBMISSION_KEY: id}
    return write_app(folder.path / "app", _sent(config), run_config=run_config, node=SuperNode, server_app=_SERVER_APP)


def _sent(config: ExperimentConfig) -> ExperimentConfig:
    """The experiment without the server's own folders."""
    changes: dict[str, Any] = {"results.root": "runs", "engine.federation": ""}
    if lies_at_nodes(config):
        # where the server evaluates makes no difference to a site
        changes |= {"partition.test_root": "", "server.evaluation": "auto"}
    return config.replace(**changes)


def _name_of(folder: RunFolder) -> str:
    """Return the run's name at the nodes: unique, and the same whenever the run is resumed."""
    # nodes keep client states under this name: a new name on resume would lose them
    path = folder.path / "name"  # of a run without an id
    if not folder.id and not path.exists():
        write_text(path, f"{folder.path.resolve().name}-{uuid.uuid4().hex[:12]}")
    return folder.id or path.read_text(encoding="utf-8")


def submit(app: Path, link: ControlHttpClient) -> int:
    """Submit an app as `flwr run` does; return the run's id."""
    content = build_fab_from_disk(app)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    return link.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
