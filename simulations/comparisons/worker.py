"""A process that plays cells: a line of JSON in for each, lines of JSON out.

In:  {"config": TOML, "resume": path or null}
Out: {"ready": true} once; then for each cell {"round": n} after every round, and at last {"finished": true},
     {"failed": sentence}, or {"stop": sentence} where going on with other cells would be of no use.

It ends as soon as the other end of its input is closed, which the system does when the process that started
it dies, however it dies.  What is printed goes to standard error: standard output is for the answers.
"""

import json
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from fedsign import config as configs
from fedsign.errors import DiskFullError, FedSignError, ResultsError
from fedsign.results import Line, open_run
from simulations import api
from simulations.callbacks.base import Callback

_PATIENCE_S = 20.0  # for the last process that played a run and is being ended by the system


class Answers(Callback):
    """Writes lines for the process that started this one."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")

    def on_round(self, line: Line) -> None:
        """Tell that a round has ended."""
        self.say(round=line["round"])

    def say(self, **message: Any) -> None:
        """One line."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()


def main() -> None:
    """Play what is asked for until the input ends."""
    answers = Answers(os.dup(1))
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, _stop)
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    answers.say(ready=True)
    while True:
        request = json.loads(requests.get())
        answers.say(**_outcome(request, answers))


def play(config_toml: str, resume: Path | None, callback: Callback) -> None:
    """Play one cell to its end, from its run's last checkpoint if there is a run that can be gone on with."""
    config = configs.from_toml(config_toml)
    if resume is None:
        api.run(config, callbacks=[callback])
        return
    _await_end_of_others(resume)
    try:
        api.run(resume=resume, callbacks=[callback])
    except ResultsError:
        # it cannot be gone on with: a damaged checkpoint, a strategy whose memory is not checkpointed
        shutil.rmtree(resume)
        api.run(config, callbacks=[callback])


def _outcome(request: dict[str, Any], answers: Answers) -> dict[str, Any]:
    """How the cell ended, as the message that says so."""
    try:
        play(request["config"], Path(request["resume"]) if request["resume"] else None, answers)
    except DiskFullError as error:
        return {"stop": str(error)}
    except FedSignError as error:
        return {"failed": str(error)}
    except Exception as error:  # one cell's defect must not end the comparison
        logging.getLogger("fedsign").exception("a cell failed")
        return {"failed": f"unexpected {type(error).__name__}: {error}"}
    return {"finished": True}


def _await_end_of_others(folder: Path) -> None:
    """Wait until nobody holds the run; a process that was killed with its parent may take a moment to go."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with open_run(folder).locked():
                return
        except ResultsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _listen(requests: "queue.SimpleQueue[str]") -> NoReturn:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # nobody is left to answer to; what is on disk is whole at any moment


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
