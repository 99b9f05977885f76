"""A worker process that runs cells (`simulations.jobs`); a job is {"config": TOML, "resume": path or null}."""

import logging
import time
from pathlib import Path

from fedsign import config as configs
from fedsign.errors import ResultsError, ResumeError
from fedsign.storage.disk import disk_errors
from fedsign.storage.finding import SET_ASIDE, open_run
from fedsign.storage.results import Record
from fedsign.transport.connection import Connection
from simulations import api
from simulations.callbacks.base import Callback
from simulations.jobs import answer_all

_PATIENCE_S = 20.0  # grace period for a process that the system is still ending


class Answers(Callback):
    """Reports a run's progress to the parent process."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent

    def on_round(self, record: Record) -> None:
        """Report the end of a round."""
        self._parent.send({"round": record["round"]})


def main(parent: Connection) -> None:
    """Run the requested cells."""
    answers = Answers(parent)
    answer_all(
        parent,
        lambda message: run_cell(message["config"], Path(message["resume"]) if message["resume"] else None, answers),
    )


def run_cell(config_toml: str, resume: Path | None, callback: Callback) -> None:
    """Run a cell to its end, from the last checkpoint if its run can be resumed.

    A run that cannot, such as one with a damaged checkpoint, is moved aside within the cell's folder, and the cell
    starts over.
    """
    config = configs.from_toml(config_toml)
    if resume is None:
        api.run(config, callbacks=[callback])
        return
    # a comparison that was killed and is resumed at once meets its own former workers
    _await_end_of_others(resume)
    try:
        api.run(resume=resume, callbacks=[callback])
    except ResumeError as error:
        aside = resume.parent / SET_ASIDE / f"{resume.name}-{time.time_ns()}"
        with disk_errors(aside):
            aside.parent.mkdir(exist_ok=True)
            # renamed, not removed: it is the only evidence of the damage
            resume.rename(aside)
        logging.getLogger("fedsign").warning("%s The cell begins anew; what there was is in %s", error, aside)
        api.run(config, callbacks=[callback])


def _await_end_of_others(folder: Path) -> None:
    """Wait until no process holds the run; one that was killed with its parent may take a moment to end."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with open_run(folder).locked():
                return
        except ResultsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
