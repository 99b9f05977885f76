"""Whose the keys and files of a server and of its sites are, and what the account that runs apps can read of them."""

import contextlib
import ctypes
import datetime as dt
import os
import re
import shutil
import signal
import subprocess
from multiprocessing import get_context
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import openings
from fedsign.errors import ConfigError
from fedsign.flower.door import hide
from simulations.deployment import accounts, check, gate, provision
from simulations.deployment.command import _opened, app
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.startup_kits import open_startup_kit
from simulations.deployment.status import status_of
from tests.deployment.test_door import NOBODY, as_nobody, error_of, needs_root
from tests.e2e.command import fedsign

YEAR = dt.timedelta(days=365)
PASSPHRASE = b"six words that nobody would guess"


def init(folder: Path, passphrase: bytes = b"") -> Federation:
    asked = Federation(folder=folder / "federation", name="hospitals", hosts=("192.0.2.10",))
    return provision.init(asked, [("berlin", None)], lifetime=YEAR, passphrase=passphrase)


def test_a_passphrase_encrypts_the_cas_key_and_renew_asks_for_it(tmp_path: Path) -> None:
    made = init(tmp_path, passphrase=PASSPHRASE)
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in made.authority_key.read_bytes()
    before = made.certificate.read_bytes()
    for wrong in (b"", b"another"):
        with pytest.raises(ConfigError, match="the passphrase is missing or wrong"):
            provision.renew(made, [], lifetime=YEAR, passphrase=lambda wrong=wrong: wrong)
    assert made.certificate.read_bytes() == before
    provision.renew(made, [], lifetime=YEAR, passphrase=lambda: PASSPHRASE)
    assert made.certificate.read_bytes() != before


def test_the_command_takes_a_passphrase_from_a_file_and_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "passphrase").write_bytes(PASSPHRASE + b"\n")
    options = ("--ca-passphrase-file", "passphrase")
    assert fedsign("deploy", "init", "--host", "localhost", *options, folder=tmp_path).stderr == ""
    assert "the passphrase is missing" in fedsign("deploy", "renew", folder=tmp_path).stderr
    assert "'none' does not exist" in fedsign("deploy", "renew", options[0], "none", folder=tmp_path).stderr
    assert fedsign("deploy", "renew", *options, folder=tmp_path).returncode == 0
    plain = fedsign("deploy", "init", "plain", "--host", "localhost", folder=tmp_path)
    assert plain.returncode == 0 and "ca.key is not encrypted" in plain.stderr


@needs_root
def test_another_account_is_told_which_one_to_use(tmp_path: Path) -> None:
    made = init(tmp_path)
    made.folder.chmod(0o700)
    said = as_nobody(lambda: error_of(lambda: _opened(made.folder)))
    assert said == as_nobody(lambda: error_of(lambda: open_federation(made.folder)))
    assert re.fullmatch(
        rf"{made.folder} belongs to root, but this is \w+; run this command as root: sudo -u root .*", said
    )


def test_the_cas_key_may_be_moved_away_and_is_read_from_there(tmp_path: Path) -> None:
    made = init(tmp_path)
    away = made.authority_key.rename(tmp_path / "hospitals.key")
    assert [*accounts.remarks(made)] == []
    with pytest.raises(ConfigError, match=r"ca\.key cannot be read .* with --ca-key"):
        provision.renew(made, [], lifetime=YEAR)
    before = made.certificate.read_bytes()
    assert fedsign("deploy", "renew", "--ca-key", str(away), folder=tmp_path).returncode == 0
    assert made.certificate.read_bytes() != before


@pytest.mark.parametrize("passphrase", [b"", PASSPHRASE])
def test_check_and_status_name_a_ca_key_that_is_neither_encrypted_nor_away(tmp_path: Path, passphrase: bytes) -> None:
    made = init(tmp_path, passphrase=passphrase)
    checked = [row["detail"] for row in check.check_server(made) if (row["what"], row["state"]) == ("accounts", "warn")]
    assert checked == status_of(made)["remarks"]
    if passphrase:
        assert checked == []
        return
    (remark,) = checked
    said = re.search(r"encrypt it with '(.*)', or move", remark)
    assert said is not None
    subprocess.run(f"{said[1]} -P '' -N '{PASSPHRASE.decode()}'", shell=True, check=True, capture_output=True)
    assert status_of(made)["remarks"] == []
    provision.renew(made, [], lifetime=YEAR, passphrase=lambda: PASSPHRASE)


def broken(federation: Federation) -> dict[str, str]:
    """What `check` says of files that is wrong at the server, and at berlin."""
    rows = [*check.check_server(federation), *check.check_site(open_startup_kit(federation.kit("berlin")))]
    return {row["what"]: row["detail"] for row in rows if row["state"] == "broken" and row["what"] != "server"}


def test_check_names_every_file_that_is_open_to_others_at_once(tmp_path: Path) -> None:
    made = init(tmp_path, passphrase=PASSPHRASE)
    kit = made.kit("berlin")
    (made.server / "state").mkdir()
    database, hidden = made.server / "superlink.sqlite", made.server / "state" / "superlink.sqlite"
    for path in (database, hidden):
        path.touch()
    modes = {
        made.server: 0o755,  # may be entered, and its public files read
        made.server / "start.sh": 0o755,
        made.server / "state": 0o700,
        hidden: 0o644,  # nobody gets there
        made.certificate: 0o644,
    }
    for path, mode in modes.items():
        path.chmod(mode)
    database.chmod(0o600)
    assert broken(made) == {}
    wrong = {
        database: 0o640,
        made.server / "server.key": 0o640,
        made.server / "start.sh": 0o775,
        made.authority_key: 0o604,
        kit / "key": 0o640,
        kit: 0o777,
    }
    for path, mode in wrong.items():
        path.chmod(mode)
    found = broken(made)
    assert "can be read by others" in found.pop("key")
    assert found == {
        str(path.relative_to(path.parent if path == kit else path.parents[0].parent)): (
            f"mode {mode:03o} lets others in: chmod go= {path}"
        )
        for path, mode in wrong.items()
    }
    for path in wrong:
        subprocess.run(["chmod", "go=", path], check=True)
    assert broken(made) == {}


@needs_root
def test_check_names_every_file_of_another_account_but_a_key_that_root_keeps(tmp_path: Path) -> None:
    made = init(tmp_path, passphrase=PASSPHRASE)
    kit = made.kit("berlin")
    for path in (made.server, *made.server.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    os.chown(made.server / "server.key", 0, 0)
    assert broken(made) == {}
    for path in (made.server / "start.sh", kit / "key"):
        os.chown(path, 1, 1)
    assert broken(made) == {
        "server/start.sh": f"belongs to daemon, expected nobody: chown nobody {made.server / 'start.sh'}",
        "berlin/key": f"belongs to daemon, expected root: chown root {kit / 'key'}",
    }


def test_what_a_site_trains_on_is_not_a_file_of_its_kit(tmp_path: Path) -> None:
    made = init(tmp_path)
    kit = made.kit("berlin")
    kit.chmod(0o755)
    (kit / "data").mkdir()
    (kit / "data").chmod(0o755)
    (kit / "data" / "shared").touch()
    (kit / "data" / "shared").chmod(0o666)
    given = (kit / "site.toml").read_text(encoding="utf-8")
    assert [*broken(made)] == ["berlin/data/shared"]  # of the server's rows and the site's
    (kit / "site.toml").write_text(given.replace('data_root = ""', 'data_root = "data"'), encoding="utf-8")
    site = check.check_site(open_startup_kit(kit))
    assert "berlin/data/shared" not in [row["what"] for row in site]


@needs_root
def test_the_account_that_runs_apps_reads_neither_the_servers_key_nor_the_memory_that_holds_it(tmp_path: Path) -> None:
    """The SuperLink is started by root with the key as its standard input, and runs as another account."""
    made = init(tmp_path)
    secret = made.server / "server.key"
    context = get_context("fork")
    here, there = context.Pipe()

    def serve() -> None:
        key, given = secret.read_bytes(), os.open(secret, os.O_RDONLY)
        os.dup2(given, 0)
        os.close(given)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as exec does: a change of account hides a process until then
        hide()
        path = Path(gate.in_memory())
        there.send((path, path.read_bytes() == key and Path("/proc/self/fd/0").resolve() == Path(os.devnull)))
        signal.pause()

    server = context.Process(target=serve)
    server.start()
    path, is_read = here.recv()
    try:
        assert is_read
        seen = [Path(str(path).replace("self", str(server.pid))), Path(f"/proc/{server.pid}/mem"), secret]
        assert as_nobody(lambda: [opened(each) for each in seen]) == [False] * 3
        assert [opened(each) for each in seen] == [True] * 3
    finally:
        server.kill()
        server.join()


def opened(path: Path) -> bool:
    with contextlib.suppress(PermissionError), path.open("rb"):
        return True
    return False


@needs_root
def test_status_names_a_key_that_runs_can_read_and_sites_of_one_account(tmp_path: Path) -> None:
    made = provision.add_site(init(tmp_path, passphrase=PASSPHRASE), "hamburg", None)
    folders = (made.server, made.kit("berlin"), made.kit("hamburg"))
    for folder in folders:
        (folder / "pid").write_text(str(os.getpid()), encoding="utf-8")
    by_key, together = accounts.remarks(made)
    assert f"runs execute code as root, who can read {made.server / 'server.key'}" in by_key
    assert together.startswith("the server, berlin, hamburg run as root, who reads each one's files")
    processes = [subprocess.Popen(["sleep", "60"], user=account) for account in (NOBODY, 1, 2)]
    try:
        for folder, process in zip(folders, processes, strict=True):
            (folder / "pid").write_text(str(process.pid), encoding="utf-8")
        assert [*accounts.remarks(made)] == []
        os.chown(made.server / "server.key", NOBODY, NOBODY)
        (by_key,) = accounts.remarks(made)
        assert "execute code as nobody" in by_key
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_status_of_a_server_with_nothing_to_remark_is_printed(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["status", str(init(tmp_path, passphrase=PASSPHRASE).folder)])
    assert said.exit_code == 1 and said.stdout.startswith("superlink    not running; start it with"), said.exception
    assert "remark" not in said.stdout


def test_units_are_hardened_and_a_sites_account_is_its_own(tmp_path: Path) -> None:
    made = init(tmp_path)
    units = [made.server / "fedsign-superlink.service", made.kit("berlin") / "fedsign-berlin.service"]
    server, site = (path.read_text(encoding="utf-8") for path in units)
    assert "User=fedsign\n" in server and "User=fedsign-berlin\n" in site
    start = "ExecStart=/opt/fedsign/bin/fedsign deploy start /opt/fedsign/federation/server --key-stdin\n"
    # nothing that root opens lies in a folder of the account, whose runs could replace it
    assert f"{start}StandardInput=file:/etc/fedsign/server.key\n" in server and "start.sh" not in server
    assert "StandardInput" not in site and "PrivateDevices" not in site  # a site trains on its GPU
    plain = replace_insecure(tmp_path)
    assert "stdin" not in (plain.server / "fedsign-superlink.service").read_text(encoding="utf-8").lower()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in units:
        command = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", unit]  # 25: 2.5 of 10
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def replace_insecure(folder: Path) -> Federation:
    asked = Federation(folder=folder / "plain", name="plain", hosts=("localhost",), insecure=True)
    return provision.init(asked, [], lifetime=YEAR)


def test_the_page_of_ports_and_files_is_that_of_its_table() -> None:
    assert openings.PAGE.read_text(encoding="utf-8") == openings.page(), "python -m benchmarks.openings"
    assert openings.differences(["port 0.0.0.0/run"], "`client.sharding.ranks`")[0] == ["port 0.0.0.0/run"]
