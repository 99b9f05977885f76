"""A site's processes: how its SuperNode is started, and the end of a process whose client hangs."""

import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from clients.site import _runtime_address
from clients.watchdog import EXIT_CODE, ended_after
from simulations.deployment.running import is_alive, with_descendants


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "9094"),
        (["--port", "7000"], "7000"),
        (["--port=7000"], "7000"),
        (["--port", "1", "--port=2"], "2"),
        (["--portal", "7000"], "9094"),
        (["--insecure", "--port"], "9094"),  # Flower says what is missing
    ],
)
def test_the_training_process_listens_where_the_supernode_speaks(arguments: list[str], expected: str) -> None:
    assert _runtime_address(arguments) == f"127.0.0.1:{expected}"


def test_a_site_sets_the_isolation_itself() -> None:
    command = [sys.executable, "-P", "-m", "clients.site", "--insecure", "--isolation=subprocess"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "Error: --isolation was given, which a site sets by itself; drop it, or start flower-supernode."
    )


def test_a_site_ends_with_its_supernode_and_its_exit_code() -> None:
    """Without TLS and without being told so, Flower's SuperNode does not find its server's certificate."""
    command = [sys.executable, "-P", "-m", "clients.site", "--root-certificates", "/nowhere/ca.crt"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "`--root-certificates` does not point to a file" in done.stderr
    assert time.monotonic() - began < 60


NEXT_APP = """
import os, sys
from clients.deployment import executor
from fedsign.flower.tasks import Task

class Tasks:
    def __init__(self, address):
        self.left = [Task(token="first", fab_hash="a"), Task(token="second", fab_hash="b")]
        self.next, self.run = lambda: self.left.pop(0), lambda task: print(task.token)

executor.Tasks = Tasks
os.execv = lambda *command: print(sys.stdin.read()) or sys.exit()
executor.serve("", "", None)
"""


def test_a_training_process_hands_the_task_of_another_app_to_its_successor() -> None:
    done = subprocess.run([sys.executable, "-c", NEXT_APP], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["first", "second", "b"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
@pytest.mark.parametrize("lived_s", [0.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_nothing_outlives_a_site_that_is_killed(lived_s: float) -> None:
    """Its SuperNode would stay online at the server, which would wait for it in vain."""
    command = [sys.executable, "-P", "-m", "clients.site", "--insecure", "--superlink", "127.0.0.1:1"]
    site = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = psutil.Process(site.pid)
    try:
        wait_for(lambda: len(with_descendants([process])) >= 3)
        time.sleep(lived_s)  # to have become other programs, or not yet
        family = with_descendants([process])
    finally:
        site.kill()
        site.wait()
    wait_for(lambda: not any(map(is_alive, family)))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_block_that_takes_too_long_ends_the_process_and_one_that_does_not_goes_on() -> None:
    program = "\n".join(
        [
            "import clients.watchdog as watchdog, sys, time",
            "watchdog._GRACE_S = 0.0",
            "with watchdog.ended_after(0.2): pass",
            "time.sleep(0.5)",
            "print('still here', flush=True)",
            "with watchdog.ended_after(0.2): time.sleep(60)",
            "print('never said')",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (EXIT_CODE, "still here\n")


def test_no_limit_of_time_is_no_watchdog() -> None:
    with ended_after(float("inf")):
        pass
