"""The Flower ServerApp: the round loop, run by a SuperLink in a process of its own.

The outcome is written to the run's folder as `served.json`, for the process that started the engine.

[Note: what the server keeps] Every site receives the run configuration. What is the server's own business, such as its
folders, is in a file below Flower's home, which the command and the ServerApp share; see `submission_of`.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import HttpGrid
from pydantic import NonNegativeInt, TypeAdapter

from clients.deployment.node import COUNTS_KEY, TOKENIZER_KEY
from clients.local_trainers import provider_of
from clients.node import RUN_KEY
from fedsign.data.base import fingerprint
from fedsign.errors import EngineError, FedSignError, shortage_of
from fedsign.flower.shims import leave_global_random_alone, quiet_flower
from fedsign.flower.superlink_grid import SuperLinkGrid
from fedsign.storage.results import RunFolder, read_json
from fedsign.transport.process import end_with
from fedsign.workload import workload_of
from simulations import signals
from simulations.backends.base import called
from simulations.deployment.engine.hooks import hooks_of
from simulations.deployment.federation import open_federation
from simulations.deployment.progress import Progress, forget_over
from simulations.deployment.running import record_this_process
from simulations.rounds import RoundLoop

SUBMISSION_KEY = "submission"  # a run may be submitted several times; only the latest submission is run
OUTCOME, PID = "served.json", "serverapp.pid"
_SHUTDOWN_S = 10.0
_COUNTS = TypeAdapter(dict[str, list[NonNegativeInt]])
_log = logging.getLogger(__name__)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds of the experiment in the run configuration."""
    name = str(context.run_config[RUN_KEY])
    submission = submission_of(Path(os.environ["FLWR_HOME"]), name)
    own = read_json(submission)
    # before anything else: Flower's own threads would keep a ServerApp without SuperLink or command alive
    end_with(os.getppid())
    end_with(own["followed_by"])
    signals.heed()
    leave_global_random_alone()
    folder = RunFolder(Path(own["folder"]))
    # before the check below: a newer submission either finds this process or is seen by it, see `end_server_app`
    record_this_process(folder.path / PID)
    if context.run_config[SUBMISSION_KEY] != read_json(submission)["id"]:
        return  # the run was submitted again; see `submit_and_follow`
    os.chdir(own["working_folder"])
    try:
        with quiet_flower():
            _run(SuperLinkGrid(cast(HttpGrid, grid)), own["experiment"], folder, name=name)
    except (Exception, signals.Ended) as caught:
        error = shortage_of(caught) or caught
        # the command raises the error again by the name of its class
        kind = type(error).__name__
        message = str(error) if isinstance(error, FedSignError) else f"{kind}: {error}"
        folder.write_json(OUTCOME, {"status": "failed", "kind": kind, "error": message})
        raise EngineError(message) from caught  # Flower must mark the run as failed, too
    folder.write_json(OUTCOME, {"status": "finished"})


def submission_of(home: Path, run: str) -> Path:
    """The file about a run below Flower's home; see [Note: what the server keeps]."""
    return home / f"submission-{run}.json"


def _run(grid: Grid, config_toml: str, folder: RunFolder, *, name: str) -> None:
    workload = workload_of(config_toml)
    config = workload.config
    # the number of threads decides the order of sums, and thereby the bits of the evaluation
    torch.set_num_threads(config.engine.threads)
    timeout_s, question = config.engine.settings["start_timeout_s"], {TOKENIZER_KEY: fingerprint(workload.dataset.text)}
    home, at_least = config.engine.settings["federation"], config.server.min_replies
    federation = open_federation(Path(home)) if home else None
    progress = None
    if federation is not None:
        # or files of finished runs would pile up, and every `deploy status` read them
        forget_over(federation)
        progress = Progress(federation, name, folder.path, num_rounds=config.rounds, model_bytes=workload.model_bytes)
    hooks = hooks_of(grid, folder, federation, progress)
    partitions = called(grid, workload, timeout_s=timeout_s, question=question, hooks=hooks, at_least=at_least)
    if progress is not None:
        progress.remarks = partitions.remarks
    # needs the roll call: labels lie at the sites
    complete_partition(folder, label_counts(partitions.answers), num_clients=config.partition.num_clients)
    try:
        RoundLoop(workload, partitions, folder).run()
    finally:
        if provider_of(workload).outlasts_messages:  # nodes may keep processes after the last message
            try:
                partitions.shut_down(timeout_s=_SHUTDOWN_S)
            except Exception as error:  # noqa: BLE001 - must not change the outcome; nodes stop idle processes
                _log.warning("nodes were not told that the run is over: %s", error)


def label_counts(answers: Mapping[int, ConfigRecord]) -> dict[int, list[int]]:
    """Return the label counts of the clients whose nodes shared them."""
    shared: dict[int, list[int]] = {}
    for client, answer in answers.items():
        try:
            counts = _COUNTS.validate_json(str(answer.get(COUNTS_KEY, "{}")))
        # a site's reply is untrusted text, and a broken one must not end the run
        except ValueError as error:
            _log.warning("the label counts of client %d are left out: %s", client, str(error).replace("\n", " "))
        else:
            shared |= {client: counts[str(client)]} if str(client) in counts else {}
    return shared


def complete_partition(folder: RunFolder, counts: Mapping[int, list[int]], *, num_clients: int) -> None:
    """Complete partition.json once every site has shared its counts."""
    # all or nothing: figures of a few sites would pass for the whole partition
    if len(counts) == num_clients:
        known = {key: value for key, value in folder.partition.items() if key != "counts_are_private"}
        folder.write_json("partition.json", {**known, "counts": [counts[site] for site in range(num_clients)]})
