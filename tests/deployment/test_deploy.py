"""A local federation set up as on several machines: TLS, a key per site, and who is rejected."""

import datetime as dt
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from benchmarks.openings import differences, watching
from clients.state.database import StateDatabase
from fedsign.config import load
from fedsign.flower.programs import find_program
from fedsign.storage.results import RunFolder
from simulations.deployment import keys, membership
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.keys import Certified, ends_at, issue
from simulations.deployment.running import flower_environment, free_port, recorded
from simulations.deployment.startup_kits import open_startup_kit
from simulations.deployment.status import status_of
from tests.deployment.test_door import INTERFACES, as_nobody, needs_root
from tests.deployment.test_door import status_of as status_at
from tests.deployment.test_sites import write_site
from tests.e2e.command import fedsign, settings
from tests.e2e.test_engines import processes_of, wait_until

NUM_SITES, ROUNDS = 2, 3
SMALL = settings(
    rounds=ROUNDS,
    partition__num_clients=NUM_SITES,
    partition__alpha=1.0,
    server__cohort_size=NUM_SITES,
    callbacks=[],
    results__checkpoint_every=1,
)
TOKEN = re.compile(r"[0-9a-f]{256}")
started: list["subprocess.Popen[bytes]"] = []  # SuperLinks, which 'fedsign deploy down' ends
ON_FEDERATION = settings(engine__name="superlink", engine__federation="federation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a federation of two sites is up, each with data of its own: `folder / "federation"`."""
    path = tmp_path_factory.mktemp("deployed")
    made = fedsign("deploy", "init", "--host", "localhost", "--port", str(free_port()), folder=path)
    assert made.returncode == 0, made.stderr
    for number, size in enumerate((60, 40), start=1):
        write_site(path / f"data of {number}", size, seed=number)
        root = ("--data-root", str(path / f"data of {number}"))
        assert fedsign("deploy", "add-site", f"site-{number}", *root, folder=path).returncode == 0
    done = fedsign("deploy", "up", "--local", str(NUM_SITES), folder=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SuperNode of") == NUM_SITES
    yield path
    fedsign("deploy", "down", folder=path)
    for process in started:
        process.wait(30)


@pytest.mark.engines
@pytest.mark.slow
def test_a_run_over_tls_with_keys_where_the_data_lie_has_the_bits_of_the_run_in_process(folder: Path) -> None:
    sites = settings(
        data__name="npz",
        data__class_names='["no", "yes"]',
        partition__name="sites",
        partition__num_clients=NUM_SITES,
        partition__input_shape="[5]",
        server__cohort_size=NUM_SITES,
        rounds=ROUNDS,
        callbacks=[],
        client__local_steps=3,
    )
    found = {}
    in_process = settings(partition__roots='["data of 1", "data of 2"]')
    federation, seen = open_federation(folder / "federation"), dict[str, set[str]]()
    for where, choice in (("federation", ON_FEDERATION), ("in_process", in_process)):
        root = folder / f"runs-{where}"
        with ExitStack() as watched:
            for title, own, place in (
                ("A federation's server", federation.server, {"federation": federation.folder}),
                ("A site", federation.kit("site-1"), {"kit": federation.kit("site-1")}),
            ):
                process = recorded(own / "pid")
                assert process is not None
                seen[title] = watched.enter_context(watching([process], place))
            done = fedsign("run", *sites, *settings(results__root=root), *choice, folder=folder, timeout_s=500)
        if where == "federation":
            hidden = ["port */SuperLink"] if os.getuid() else []  # from accounts but root
            assert differences(seen["A federation's server"], "A federation's server") == ([], hidden)
            assert differences(seen["A site"], "A site") == ([], [])
        assert done.returncode == 0, done.stderr
        (config,) = root.glob("*/*/config.toml")
        found[where] = bits(config.parent, folder)
    assert found["federation"] == found["in_process"]
    (lines,) = folder.glob("runs-federation/*/*/sites.jsonl")
    assert '"site-1"' in lines.read_text(encoding="utf-8")


@pytest.mark.engines
@pytest.mark.slow
def test_a_run_whose_command_is_killed_ends_and_is_resumed_to_the_same_bits(folder: Path) -> None:
    own = settings(results__root=folder / "killed", strategy__name="feddyn")
    command = [sys.executable, "-m", "simulations.cli", "run", *SMALL, *own, *ON_FEDERATION]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: any(path.stat().st_size for path in folder.glob("killed/*/*/rounds.jsonl")), timeout_s=240)
    assert not tokens_in_sight(folder / "federation", of="flwr-serverapp")
    process.kill()
    process.wait()
    (config,) = folder.glob("killed/*/*/config.toml")
    resumed = fedsign("run", "--resume", str(config.parent), folder=folder, timeout_s=500)
    assert resumed.returncode == 0, resumed.stderr
    # for the second app, which has handed its token to itself
    assert not tokens_in_sight(folder / "federation", of="clients.deployment.executor")
    calm = fedsign("run", *SMALL, *settings(results__root=folder / "calm", strategy__name="feddyn"), folder=folder)
    assert calm.returncode == 0, calm.stderr
    (expected,) = folder.glob("calm/*/*/config.toml")
    assert bits(config.parent, folder) == bits(expected.parent, folder)
    assert "state of client 1" in bits(config.parent, folder)


@pytest.mark.engines
@pytest.mark.slow
def test_a_run_goes_on_by_itself_when_its_superlink_is_killed_and_started_again(folder: Path) -> None:
    """`fedsign deploy status` shows it. If the command is killed too, the server's next start prints the one to run."""
    federation, own = open_federation(folder / "federation"), settings(strategy__name="feddyn", rounds=8)
    options = [*SMALL, *own, *settings(results__root=folder / "relinked"), *ON_FEDERATION]
    command = [sys.executable, "-m", "simulations.cli", "run", *options]
    with (folder / "relinked.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    wait_until(lambda: any(path.stat().st_size for path in folder.glob("relinked/*/*/rounds.jsonl")), timeout_s=240)
    (config,) = folder.glob("relinked/*/*/config.toml")
    seen = json.loads(fedsign("deploy", "status", "federation", "--json", folder=folder).stdout)
    assert seen["is_up"] and [run["run"] for run in seen["runs"]] == [str(config.parent)]
    assert [(site["state"], site["versions"]) for site in seen["sites"]] == [("online", "the server's")] * NUM_SITES
    kill_superlink(federation)
    gone = fedsign("deploy", "status", "federation", folder=folder)
    assert gone.returncode == 1 and "not running; start it with" in gone.stdout
    start_superlink(federation)
    assert process.wait(400) == 0, (folder / "relinked.log").read_text()
    told = (folder / "relinked.log").read_text()
    assert "the SuperLink stopped during the run; restart it within" in told
    assert "the SuperLink restarted: the run continues after round" in told
    calm = fedsign("run", *SMALL, *own, *settings(results__root=folder / "linked"), folder=folder)
    assert calm.returncode == 0, calm.stderr
    (expected,) = folder.glob("linked/*/*/config.toml")
    assert bits(config.parent, folder) == bits(expected.parent, folder)
    for where in ("federation", "federation/kits/site-1"):
        assert re.match(
            r"\d{4}-\d\d-\d\d \d\d:", fedsign("deploy", "logs", where, "-n", "3", folder=folder, fresh=True).stdout
        )

    again = [*command, "--set", "rounds=50"]
    process = subprocess.Popen(again, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len([*folder.glob("relinked/*/*/config.toml")]) == 2, timeout_s=60)
    wait_until(lambda: "train" in str(status_of(federation)["runs"]), timeout_s=240)
    kill_superlink(federation)
    process.kill()
    process.wait()
    (interrupted,) = [path.parent for path in folder.glob("relinked/*/*/config.toml") if path != config]
    said = start_superlink(federation)
    assert f"resume it with: fedsign run --resume {interrupted}" in said.read_text()


def tokens_in_sight(root: Path, *, of: str) -> list[str]:
    """Tokens of tasks on the command lines and in the environments of a federation's processes, `of` one among them."""
    commands = processes_of(root)
    assert any(of in command for command in commands)
    numbers = [command.split()[0] for command in commands]
    environments = [Path(f"/proc/{number}/environ").read_text(errors="replace") for number in numbers]
    return TOKEN.findall("\n".join([*commands, *environments]))


def kill_superlink(federation: Federation) -> None:
    """It alone, as a lack of memory does."""
    process = membership.process_of(federation)
    assert process is not None
    process.kill()
    process.wait(10)


def start_superlink(federation: Federation) -> Path:
    """As systemd does, with a key that the account cannot read; returns what it says."""
    said, key = federation.folder.with_name("started.log"), federation.server / "server.key"
    roots = key.rename(federation.folder / "roots")
    with said.open("wb") as log, roots.open("rb") as given:
        environment = {**os.environ, "FEDSIGN": str(Path(sys.executable).parent / "fedsign")}
        command = [str(federation.server / "start.sh"), "--key-stdin"]
        started.append(subprocess.Popen(command, stdin=given, stdout=log, stderr=subprocess.STDOUT, env=environment))
    wait_until(lambda: membership.answers(federation), timeout_s=180)
    roots.rename(key)
    return said


HALTING = """
import time
from pathlib import Path

import flwr.superlink.grid.http_grid as grid

from strategies.feddyn import FedDyn


class Halting(FedDyn):
    def sample(self, round, clients, cohort_size, rng):
        announced = Path("{announced}")
        if round == 2 and not announced.exists():

            def push_objects(*given, **settings):
                announced.touch()
                time.sleep(1e6)

            grid.push_objects = push_objects
        return super().sample(round, clients, cohort_size, rng)
"""


def is_receiving(log: Path) -> bool:
    """Whether a SuperNode has heard of a message whose content it does not have."""
    _, heard, since = log.read_text(encoding="utf-8").rpartition("Receiving: train message")
    return bool(heard) and "Received successfully" not in since


@pytest.mark.engines
@pytest.mark.slow
def test_nodes_to_whom_a_message_was_announced_that_never_came_serve_the_run_that_is_resumed(folder: Path) -> None:
    """The run is killed after its messages are announced, and before their content is sent."""
    announced = folder / "announced"
    (folder / "halting.py").write_text(HALTING.format(announced=announced), encoding="utf-8")
    own = settings(results__root=folder / "halted", strategy__name="halting:Halting")
    command = [sys.executable, "-m", "simulations.cli", "run", *SMALL, *own, *ON_FEDERATION]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(announced.exists, timeout_s=240)
    logs = [folder / "federation" / "logs" / f"site-{number}.log" for number in (1, 2)]
    wait_until(lambda: all(map(is_receiving, logs)), timeout_s=120)
    process.kill()
    process.wait()
    (config,) = folder.glob("halted/*/*/config.toml")
    resumed = fedsign("run", "--resume", str(config.parent), folder=folder, timeout_s=500)
    assert resumed.returncode == 0, resumed.stderr
    assert [line["num_replies"] for line in RunFolder(config.parent).rounds()] == [NUM_SITES] * ROUNDS


@pytest.mark.engines
@pytest.mark.slow
def test_check_finds_nothing_broken_at_server_and_sites_and_no_file_is_anyone_elses(folder: Path) -> None:
    for where in ("federation", "federation/kits/site-1", "federation/kits/site-2"):
        done = fedsign("deploy", "check", where, folder=folder)
        assert done.returncode == 0, done.stdout
        assert "broken" not in done.stdout
    paths = [folder / "federation", *(folder / "federation").rglob("*")]
    assert {path.name for path in paths} > {"superlink.sqlite", "log", "superlink.log", "node.toml", "pid", "node-id"}
    assert not [path for path in paths if path.stat().st_mode & 0o077], "what others may read or write"
    assert (folder / "federation" / "server" / "start.sh").stat().st_mode & 0o100


@needs_root
@pytest.mark.engines
@pytest.mark.slow
def test_another_account_of_the_servers_machine_reaches_no_interface(folder: Path) -> None:
    federation = open_federation(folder / "federation")
    trust = ssl.create_default_context(cafile=federation.authority)
    interfaces = {path: "401" if "fleet" in path else "403" for path in INTERFACES}
    asked = as_nobody(lambda: {path: status_at(federation.port, path, trust=trust) for path in interfaces})
    assert asked == interfaces
    assert status_at(federation.port, "/docs", method="GET", trust=trust) == "200"


@pytest.mark.engines
@pytest.mark.slow
def test_a_strangers_key_is_refused(folder: Path) -> None:
    """By our words, and by Flower's program where ours was passed by."""
    kit = copy_of_kit(folder, "stranger")
    (kit / "key").unlink()
    public = keys.make_key(kit / "key", comment="stranger")
    (kit / "key.pub").write_text(public + "\n", encoding="utf-8")
    refused = fedsign("deploy", "start", str(kit), folder=folder)
    assert refused.returncode == 1
    assert "the SuperLink rejects this site's key" in refused.stderr
    assert turned_away(open_federation(folder / "federation"), kit, kit / "key")


@pytest.mark.engines
@pytest.mark.slow
def test_a_server_that_another_ca_vouches_for_is_refused(folder: Path) -> None:
    kit = copy_of_kit(folder, "deceived")
    other = fedsign("deploy", "init", "other", "--host", "localhost", folder=folder)
    assert other.returncode == 0, other.stderr
    shutil.copy(folder / "other" / "ca" / "ca.pem", kit / "ca.pem")
    refused = fedsign("deploy", "start", str(kit), folder=folder)
    assert refused.returncode == 1
    assert "not signed by this federation's CA" in refused.stderr


@pytest.mark.engines
@pytest.mark.slow
def test_the_number_of_supernodes_belongs_to_the_sites(folder: Path) -> None:
    done = fedsign("run", *SMALL, *ON_FEDERATION, *settings(engine__num_supernodes=2), folder=folder)
    assert done.returncode == 2
    assert "leave engine.num_supernodes out" in done.stderr


@pytest.mark.engines
@pytest.mark.slow
def test_a_revoked_site_is_out_at_once_and_for_good_and_down_leaves_no_process(folder: Path) -> None:
    federation = open_federation(folder / "federation")
    kit = federation.kit("site-2")
    assert processes_of(kit.resolve())
    assert fedsign("deploy", "revoke", "site-2", folder=folder).returncode == 0
    wait_until(lambda: not processes_of(kit.resolve()), timeout_s=90)
    refused = fedsign("deploy", "start", str(kit), folder=folder)
    assert refused.returncode == 1
    assert "it is revoked" in refused.stderr
    assert turned_away(federation, kit, kit / "key")

    run = fedsign("run", *SMALL, *ON_FEDERATION, folder=folder)
    assert run.returncode == 0, run.stderr
    assert "1 of the run's 2 sites are revoked" in run.stderr
    assert "round 1: site site-2 revoked: the run continues without it" in run.stderr
    strict = fedsign("run", *SMALL, *ON_FEDERATION, *settings(server__min_replies=2), folder=folder)
    assert strict.returncode == 2
    assert "server.min_replies=2 was given, but 1 of the run's 2 sites are active" in strict.stderr

    assert processes_of(federation.folder)
    assert fedsign("deploy", "down", folder=folder).returncode == 0
    assert not processes_of(federation.folder)
    late = fedsign(
        "run", *SMALL, *ON_FEDERATION, *settings(partition__num_clients=1, server__cohort_size=1), folder=folder
    )
    assert late.returncode == 1
    assert "is not up on this machine" in late.stderr

    assert fedsign("deploy", "up", "--local", "1", folder=folder).returncode == 0  # with the memory it had
    again = fedsign("deploy", "start", str(kit), folder=folder)
    assert "it is revoked" in again.stderr
    assert fedsign("deploy", "down", folder=folder).returncode == 0


@pytest.mark.engines
@pytest.mark.slow
def test_an_expired_certificate_is_refused_by_the_server_the_sites_and_the_run(tmp_path: Path) -> None:
    """One that ends while the SuperLink runs, and one that is over before."""
    made = fedsign("deploy", "init", "--host", "localhost", "--port", str(free_port()), "--site", "a", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    federation = open_federation(tmp_path / "federation")
    give_certificate(federation, lifetime=dt.timedelta(seconds=90))
    with serving(federation):
        left_s = (ends_at(federation.certificate) - dt.datetime.now(dt.UTC)).total_seconds()
        time.sleep(max(0.0, left_s) + 1)
        site = fedsign("deploy", "start", "federation/kits/a", folder=tmp_path)
        assert site.returncode == 1
        assert "has expired" in site.stderr
        assert turned_away(federation, federation.kit("a"), federation.kit("a") / "key")
        checked = fedsign("deploy", "check", "federation/kits/a", folder=tmp_path)
        assert checked.returncode == 1
        assert "has expired" in checked.stdout
        shown = fedsign("deploy", "status", "federation", folder=tmp_path)
        assert shown.returncode == 1
        assert re.search(
            r"the certificate of 127\.0\.0\.1 has expired, on .* UTC; .*'fedsign deploy renew'", shown.stderr
        )
        one = settings(partition__num_clients=1, server__cohort_size=1)
        run = fedsign("run", *SMALL, *ON_FEDERATION, *one, folder=tmp_path)
        assert run.returncode == 2
        assert re.search(r"the server's certificate ended on .* UTC; make a new one", run.stderr)
    server = fedsign("deploy", "start", "federation", folder=tmp_path)
    assert server.returncode == 2
    assert "make a new one on the server's machine with 'fedsign deploy renew'" in server.stderr
    assert fedsign("deploy", "renew", "--days", "20", folder=tmp_path).returncode == 0
    checked = fedsign("deploy", "check", "federation", folder=tmp_path)
    assert checked.returncode == 0
    assert re.search(r"certificate +warn +ends in 20 days", checked.stdout)


@pytest.mark.engines
@pytest.mark.slow
def test_up_makes_a_federation_where_there_is_none_and_down_ends_it(tmp_path: Path) -> None:
    up = fedsign("deploy", "up", "--local", "1", folder=tmp_path)
    assert up.returncode == 0, up.stderr
    assert "made a federation for this machine alone" in up.stdout
    assert (
        "federation/server and federation/ca are the server's, federation/kits/SITE and its data the site's"
        in up.stdout
    )
    assert "the server, site-1 run as" in up.stdout  # here they are one account, as status says
    assert not (tmp_path / "federation" / "ca" / "ca.key").exists()
    wait_until(lambda: len(processes_of(tmp_path / "federation")) > 2, timeout_s=120)
    down = fedsign("deploy", "down", folder=tmp_path)
    assert down.stdout.startswith("ended: ")
    assert not processes_of(tmp_path / "federation")
    assert fedsign("deploy", "down", folder=tmp_path).stdout == "nothing was running\n"


@pytest.mark.engines
@pytest.mark.slow
def test_an_insecure_federation_is_asked_for_and_says_so_at_every_start(tmp_path: Path) -> None:
    made = fedsign(
        "deploy",
        "init",
        "--host",
        "localhost",
        "--port",
        str(free_port()),
        "--site",
        "a",
        "--insecure",
        folder=tmp_path,
    )
    assert "warning: this federation is insecure" in made.stderr
    up = fedsign("deploy", "up", "--local", "1", folder=tmp_path)
    assert up.returncode == 0, up.stderr
    for name in ("superlink", "a"):
        assert "this federation is insecure" in (tmp_path / "federation" / "logs" / f"{name}.log").read_text("utf-8")
    assert fedsign("deploy", "down", folder=tmp_path).returncode == 0


def test_the_default_is_a_local_deployment() -> None:
    assert load(None, ["engine.name=superlink"]).engine.settings["federation"] == ""


def bits(run: Path, folder: Path) -> dict[str, bytes]:
    """All that should not depend on where it ran; clients' states lie in the kits there, in a database here."""
    checkpoint = run / "checkpoints" / f"round-{ROUNDS:06d}"
    paths = [run / "rounds.jsonl", run / "model.safetensors", *checkpoint.glob("*.safetensors")]
    found = {str(path.relative_to(run)): path.read_bytes() for path in paths}
    at_sites = folder / "federation" / "kits"
    database = StateDatabase(run / "clients")
    for partition in range(NUM_SITES):
        files = list(at_sites.glob(f"*/flower/clients/{run.name}-*/{partition:06d}/round-{ROUNDS:06d}.safetensors"))
        state = load_file(files[0]) if files else database.read(partition, ROUNDS)
        if state is not None:
            found[f"state of client {partition}"] = save(dict(sorted(state.items())))
    database.close()
    return found


def copy_of_kit(folder: Path, name: str) -> Path:
    """Of a site's kit, as it was sent."""
    kit = folder / name
    shutil.unpack_archive(folder / "federation" / "kits" / "site-1.tar.gz", folder / f"{name}-unpacked")
    (folder / f"{name}-unpacked" / "site-1").rename(kit)
    return kit


def turned_away(federation: Federation, kit: Path, key: Path) -> bool:
    """Whether Flower's own SuperNode ends with an error when it is started without us."""
    program = find_program("flower-supernode")
    arguments = ["--superlink", open_startup_kit(kit).address, "--root-certificates", str(federation.authority)]
    more = ["--auth-supernode-private-key", str(key), "--host", "127.0.0.1", "--port", str(free_port())]
    done = subprocess.run(
        [program, *arguments, *more, "--max-retries", "2", "--isolation", "process"],  # no SuperExec, which outlives it
        env=flower_environment(kit / "flower"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    return done.returncode != 0


def give_certificate(federation: Federation, *, lifetime: dt.timedelta) -> None:
    authority = Certified(certificate=federation.authority.read_bytes(), key=federation.authority_key.read_bytes())
    issue(authority, federation.hosts, lifetime=lifetime).write(
        federation.certificate, federation.server / "server.key"
    )


@contextmanager
def serving(federation: Federation) -> Iterator[None]:
    """Its SuperLink, in the foreground as systemd starts it."""
    command = [sys.executable, "-m", "simulations.cli", "deploy", "start", str(federation.folder)]
    with (federation.folder / "superlink.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: membership.answers(federation), timeout_s=180)
        yield
    finally:
        process.terminate()
        process.wait(30)
        wait_until(lambda: not processes_of(federation.folder), timeout_s=60)
