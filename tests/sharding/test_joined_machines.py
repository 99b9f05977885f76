"""A client on two machines with addresses, a secret, and a cable between them, which is pulled."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.alone.shaped import DEVICE, Cable, cable
from tests.distributed.test_sharded_clients import marked, numbers, wait_for
from tests.e2e.namespaces import ip, why_not

WITHIN_S = 30.0
FIRST = """
import json, sys, time
from contextlib import closing
from pathlib import Path
from clients.sharding.group import ShardGroup
from clients.trainer import SequentialTrainer
from tests.distributed.test_joined_machines import MORTAL, answer, close, request, workload

if __name__ == "__main__":
    root = Path(sys.argv[1])
    work = workload(root, sys.argv[2], MORTAL, secret_file=sys.argv[3], insecure_network=True)
    asked = request(work)
    expected = answer(SequentialTrainer(work), asked, root).tensors
    with closing(ShardGroup(work, logs=root / "logs")) as group:
        for _ in sys.stdin:
            began = time.monotonic()
            found = answer(group, asked, root)
            took_s = time.monotonic() - began
            reason = getattr(found, "reason", "")
            print(json.dumps([reason, not reason and close(found.tensors, expected), took_s]), flush=True)
"""


@pytest.fixture
def net() -> Iterator[Cable]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with cable() as made:
        yield made


@pytest.mark.slow
def test_a_cable_that_is_pulled_ends_the_round_and_put_back_the_machine_joins_again(
    net: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"FEDSIGN_TEST={tmp_path.name}"
    monkeypatch.setenv(*mark.split("="))
    secret, there, address = tmp_path / "silo.secret", tmp_path / "other", f"{net.address(0)}:29400"
    secret.write_text("5c1f2e3d4b5a69788796a5b4c3d2e1f0\n")
    secret.chmod(0o600)
    there.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    first_command = [sys.executable, "-c", FIRST, str(tmp_path), address, str(secret)]
    command = [sys.executable, "-m", "simulations.cli", "worker", "--join", address, "--secret-file", str(secret)]
    with ExitStack() as machines:
        first = machines.enter_context(subprocess.Popen(net.inside(0, first_command), **pipes, cwd=tmp_path))
        machines.callback(first.kill)
        other = machines.enter_context(subprocess.Popen(net.inside(1, command), **pipes, cwd=there))
        machines.callback(other.kill)
        assert first.stdin is not None and first.stdout is not None

        print(file=first.stdin, flush=True)
        assert json.loads(first.stdout.readline())[:2] == ["", True]

        (there / "die").write_text("sleep")
        print(file=first.stdin, flush=True)
        assert wait_for(lambda: not (there / "die").exists(), 60)  # its rank is in the middle of a step
        ip("-n", net.hosts[1], "link", "set", DEVICE, "down")
        reason, _, took_s = json.loads(first.stdout.readline())
        assert f"machine 2 of 2 ({net.address(1)}), which holds rank 1 of the 2 processes" in reason
        assert "is lost: its worker has ended, or the network to it is broken" in reason and took_s < WITHIN_S
        assert wait_for(lambda: not numbers(mark, "clients.sharding.process"), WITHIN_S), (
            "ranks on either side are left"
        )

        ip("-n", net.hosts[1], "link", "set", DEVICE, "up")
        print(file=first.stdin, flush=True)
        assert json.loads(first.stdout.readline())[:2] == ["", True]
        first.stdin.close()
        assert first.wait(30) == 0 and other.wait(30) == 0
    assert not marked(mark)
