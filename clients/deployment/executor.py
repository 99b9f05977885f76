"""The process in which a site's clients train: it imports torch and loads the data once, not for every message.

`clients.site` starts it beside a SuperNode, and restarts it whenever it ends.  A process serves one app; for the next
app it re-executes itself, so that no module of another run remains loaded.
"""

import logging
import os
import sys
from typing import NoReturn

from fedsign.flower.programs import unseen
from fedsign.flower.tasks import Task, Tasks
from fedsign.transport.process import end_with


def serve(address: str, site: str, task: Task | None) -> NoReturn:
    """Process tasks one after another; `site` is the process id of the site."""
    tasks = Tasks(address)
    task = task or tasks.next()
    served = task.fab_hash
    while task.fab_hash == served:
        tasks.run(task)
        task = tasks.next()
    # The next task is acquired already, so its token goes along.  exec keeps the process id that the site watches.
    with unseen(f"{task.token} {task.fab_hash}") as given:
        os.dup2(given.fileno(), sys.stdin.fileno())
    os.execv(sys.executable, [sys.executable, "-P", "-m", "clients.deployment.executor", address, site])


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    _address, _site = sys.argv[1:]
    _given = sys.stdin.read().split()
    end_with(int(_site))
    serve(_address, _site, Task(token=_given[0], fab_hash=_given[1]) if _given else None)
