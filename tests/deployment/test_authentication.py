"""Authentication at a SuperLink, and what its operator sees: Flower's HTTP application behind the gate, with TLS."""

import datetime as dt
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedsign.errors import EngineError
from fedsign.flower.pulling import Requests
from fedsign.storage.results import RunFolder
from simulations.deployment import keys, progress, provision, start
from simulations.deployment.check import check_site
from simulations.deployment.federation import open_federation
from simulations.deployment.logs import log_of
from simulations.deployment.probe import StillThereError
from simulations.deployment.progress import Progress, forget_over, runs_of
from simulations.deployment.running import record_this_process
from simulations.deployment.startup_kits import StartupKit, open_startup_kit
from simulations.deployment.status import status_of
from tests.deployment.served import HOST, Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("made") / "federation") as made:
        yield made


def greeted(kit: StartupKit) -> list[str]:
    """What a site says on its way in."""
    said: list[str] = []
    start._greet(kit, said.append, HOST)
    return said


def test_a_site_that_was_killed_is_told_what_it_waits_for_and_let_in_when_its_heartbeat_has_run_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_POLL_S", 0.05)
    served.was_killed(still_believed_s=60)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        served.state.nodes[served.node_id].online_until = time.time() + 0.3  # its heartbeat has nearly run out

    start._greet(served.kit, say, HOST)
    assert len(said) == 1 and not served.state.nodes[served.node_id].online_until > time.time() + 1
    assert "believes that its former SuperNode is still connected: for 60 s after that was killed" in said[0]
    assert greeted(served.kit) == []


def test_a_site_that_remembers_its_former_supernode_does_not_wait(served: Served) -> None:
    served.was_killed(still_believed_s=60)
    (served.kit.folder / "flower").mkdir(exist_ok=True)
    (served.kit.folder / "flower" / "node-id").write_text(str(served.node_id), encoding="ascii")
    assert greeted(served.kit) == []


def test_a_key_that_is_in_use_elsewhere_is_refused_when_the_wait_is_over(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.was_killed(still_believed_s=60)
    monkeypatch.setattr(start, "HEARTBEAT_S", -start._SLACK_S)
    with pytest.raises(StillThereError, match="or as long as another machine uses the same key"):
        greeted(served.kit)
    (row,) = (row for row in check_site(served.kit) if row["what"] == "membership")
    assert (row["state"], "former SuperNode" in row["detail"]) == ("warn", True)


def test_the_keys_of_strangers_and_of_revoked_sites_are_refused_at_once(served: Served) -> None:
    """Also where the SuperLink still knows them."""
    provision.revoke(open_federation(served.federation.folder), "b")
    kit = served.federation.kit("b")
    for _ in ("revoked", "stranger"):
        began_at = time.monotonic()
        with pytest.raises(EngineError, match="rejects this site's key: it is revoked or was never registered"):
            greeted(open_startup_kit(kit))
        assert time.monotonic() - began_at < start.HEARTBEAT_S / 2
        (kit / "key").unlink()
        keys.make_key(kit / "key", comment="b")


def test_status_shows_the_runs_the_sites_and_who_is_waited_for(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, run = open_federation(served.federation.folder), RunFolder(tmp_path / "run")
    run.path.mkdir()
    assert not status_of(federation)["is_up"] and "not running; start it" in status_of(federation)["superlink"]
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    record_this_process(federation.server / "pid")
    told = Progress(federation, "run-1", run.path, num_rounds=9)
    told.remarks = {0: "", 1: "torch 1.0 where the server has 2.0"}
    for event in ("late", "late", "refused"):
        run.append("members.jsonl", {"round": 2, "site": "a", "event": event, "why": "because"})
    run.append("failures.jsonl", {"round": 2, "partition": 0, "reason": "site a: late", "details": ""})
    served.was_killed(still_believed_s=60)
    told(Requests("train", 3, [0, 1]), [0, 1])
    with run.locked():
        told(Requests("train", 3, [0, 1]), [0])
        found = status_of(federation)
    assert found["is_up"] and f"process {os.getpid()} at {federation.local_address} since" in found["superlink"]
    assert found["certificate"].startswith("until ")
    (row,) = found["runs"]
    assert (row["run"], row["round"], row["waits for"]) == (str(run.path), "3/9", "a")
    assert row["phase"].startswith("train for ")
    a, b = found["sites"]
    assert (a["state"], a["versions"], a["failures"], a["late"], a["refused"]) == ("online", "the server's", 1, 2, 1)
    assert a["last event"] == "round 2: refused, because"
    seen_s = dt.datetime.now() - dt.datetime.fromisoformat(a["last seen"])
    assert abs(seen_s.total_seconds()) < 3, "its last heartbeat is what Flower's belief begins with"
    assert (b["partition"], b["versions"], b["last seen"]) == (1, "torch 1.0 where the server has 2.0", None)

    (interrupted,) = status_of(federation)["runs"]
    assert interrupted["phase"] == f"interrupted; resume with: fedsign run --resume {run.path}"
    run.conclude({"status": "finished"})
    assert status_of(federation)["runs"] == []
    forget_over(federation)
    Progress(federation, "run-2", run.path, num_rounds=9)
    assert [each.file.stem for each in runs_of(federation)] == ["run-2"]


def test_what_a_program_prints_is_kept_with_times_and_without_colors(tmp_path: Path) -> None:
    """Also what it starts prints; and the terminal sees all of it as it is."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from simulations.deployment import logs\n"
        "logs.keep(Path(sys.argv[1]))\n"
        "print('\\x1b[92mINFO\\x1b[0m: started', flush=True)\n"
        "os.system('echo from a child >&2')\n"
        "os.execvp('echo', ['echo', 'become another'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "\x1b[92mINFO\x1b[0m: started\nfrom a child\nbecome another\n"
    lines = log_of(tmp_path).read_text(encoding="utf-8").splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == ["INFO: started", "from a child", "become another"]
    times = [dt.datetime.fromisoformat(line[:19]) for line in lines]
    assert times == sorted(times)


def test_the_last_words_of_a_program_that_is_asked_to_end_with_its_whole_group_are_kept(tmp_path: Path) -> None:
    """As systemd does it: the program that keeps the log is asked, too."""
    program = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from simulations.deployment import logs\n"
        "logs.keep(Path(sys.argv[1]))\n"
        "print('up', flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "print('last words', flush=True)\n"
    )
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    command = [sys.executable, "-c", block + program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        for each in (*psutil.Process(process.pid).children(), psutil.Process(process.pid)):
            each.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "last words\n"
    assert process.returncode == 0
    assert log_of(tmp_path).read_text(encoding="utf-8").endswith("last words\n")


@pytest.mark.parametrize("content", ["", "\0" * 300, "{}", '{"run": "/x", "later": 1}'])
def test_how_far_a_run_is_may_be_damaged(served: Served, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """By a power cut, or written by a later version: the server starts all the same."""
    folder = served.federation.server / "state" / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "damaged.json").write_text(content, encoding="utf-8")
    assert "damaged" not in [run.file.stem for run in runs_of(served.federation)]
    assert "how far a run is cannot be read" in caplog.text
    (folder / "damaged.json").unlink()


def test_a_log_is_cut_into_files_of_which_the_oldest_go(tmp_path: Path) -> None:
    program = "import sys\nfrom simulations.deployment import logs\nlogs._MAX_BYTES = 1000\nlogs.main(sys.argv[1])\n"
    sent = "".join(f"line {number}\n" for number in range(1000))
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    done = subprocess.run(command, input=sent, capture_output=True, text=True, check=True)
    assert done.stdout == sent
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4 and all(file.stat().st_size <= 1000 for file in files)
    assert (tmp_path / "log").read_text(encoding="utf-8").endswith("line 999\n")
