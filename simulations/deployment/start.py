"""`fedsign deploy start`, `up` and `down`: run Flower's SuperLink and SuperNodes as configured by their folders.

The start scripts and systemd units call `start`, so that an expired certificate or a key that others can read is
refused with one clear sentence before anything listens.
"""

import datetime as dt
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import tomli_w

from fedsign.errors import ConfigError, EngineError
from fedsign.flower.door import BLIND, INSECURE, tells_accounts
from fedsign.storage.disk import is_private
from simulations.deployment import logs
from simulations.deployment.federation import Federation, with_port
from simulations.deployment.keys import ANEW, RENEW, ends_at, load_private, validity
from simulations.deployment.membership import answers, nodes_of
from simulations.deployment.probe import HEARTBEAT_S, AwayError, StillThereError, check_is_known, probe_server
from simulations.deployment.progress import runs_of
from simulations.deployment.running import Programs, end, flower_environment, free_port, record_this_process, recorded
from simulations.deployment.startup_kits import StartupKit

Say = Callable[[str], None]
# -P: a module in the current folder, such as a kit, must not shadow an installed one
_START = [sys.executable, "-P", "-m", "simulations.cli", "deploy", "start"]
_SLACK_S, _POLL_S = 15.0, 1.0
_AWAY_S = 60.0  # then Flower goes on trying, which may know a way that the probe does not, such as a proxy
UNSAFE = (
    "this federation is insecure, as was asked for with --insecure: what it sends can be read and changed on its "
    "way, and any machine may take part. For trying out only."
)

PLAIN = (
    "this federation lets in plain SuperNodes, as was asked for with --plain-supernodes: who obtains the headers of "
    "one of their requests can send others in the site's name for five minutes."
)


def start_server(federation: Federation, say: Say, *, key_stdin: bool = False) -> NoReturn:
    """Replace this process by the SuperLink. `key_stdin`: its key comes from standard input.

    Raises:
        ConfigError: the certificate has expired, or a key is missing, or readable for others.
    """
    _check_accounts()
    _claim(federation.server)
    check_trust(federation, say)
    state, home, key = (federation.server / name for name in ("state", "flower", "server.key"))
    gate = ["simulations.deployment.gate", str(federation.folder), "--disable-runtime-dependency-installation"]
    gate += ["--host", federation.bind, "--port", str(federation.port), "--database", str(state / "superlink.sqlite")]
    link: dict[str, str | bool] = {"address": federation.local_address}  # for `flwr` on this machine
    if federation.insecure:
        gate.append("--insecure")
        link["insecure"] = True
    elif not key_stdin and not (os.access(key, os.R_OK) and is_private(key)):
        raise ConfigError(
            f"{key} must be readable by this account, and by no other; restore it, make it private with chmod 600, or "
            "pass it as standard input with --key-stdin."
        )
    else:
        gate += [
            "--ssl-certfile", str(federation.certificate), "--ssl-keyfile", "/dev/stdin" if key_stdin else str(key),
            "--ssl-ca-certfile", str(federation.authority), "--enable-supernode-auth",
        ]  # fmt: skip
        link["root-certificates"] = str(federation.authority)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.mkdir(exist_ok=True)
    for run in runs_of(federation):
        # a run whose command still waits for this SuperLink (`is_running`) goes on by itself
        if not (run.is_running or run.is_over):
            say(f"a run was interrupted in round {run.round} of {run.num_rounds}; resume it with: {run.how_to_go_on}")
    tree = {"superlink": {"default": "fedsign", "fedsign": link}}
    (home / "config.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    _become(federation.server, home, gate)


def start_site(kit: StartupKit, say: Say, *, host: str | None = None) -> NoReturn:
    """Replace this process by the SuperNode; `host`: connect to this name of the server instead of the kit's.

    Raises:
        ConfigError: the key is missing or readable for others.
        ServerError: the server's certificate is not signed by the federation's CA.
    """
    _check_accounts()
    _claim(kit.folder)
    host = host or kit.facts["host"]
    trust = ["--insecure"]
    if kit.trusted is None:
        say(UNSAFE)
    else:
        load_private(kit.key)  # for its checks: Flower does not mind a key that others can read
        trust = ["--root-certificates", str(kit.trusted), "--auth-supernode-private-key", str(kit.key)]
    _greet(kit, say, host)
    config = kit.folder / "node.toml"
    config.write_text(tomli_w.dumps(kit.node_config()), encoding="utf-8")
    # a port of its own for the SuperNode's Runtime API: several SuperNodes may run on one machine
    address = ["--superlink", with_port(host, kit.facts["port"]), "--host", "127.0.0.1", "--port", str(free_port())]
    arguments = ["clients.site", *address, *trust, "--node-config", str(config)]
    server = [host, str(kit.facts["port"]), *([str(kit.trusted)] if kit.trusted else [])]
    _become(kit.folder, kit.folder / "flower", arguments, server)


def up(federation: Federation, num_sites: int, *, timeout_s: float, say: Say) -> None:
    """Start the SuperLink and the first sites' SuperNodes, and wait until they are online.

    Raises:
        ConfigError: the federation has fewer sites, or a kit is stored elsewhere.
        EngineError: a process ends or does not answer in time; all are ended.
    """
    sites = federation.active[:num_sites]
    if len(sites) < num_sites:
        raise ConfigError(
            f"--local {num_sites} was given, but the federation {federation.name} has {len(federation.active)} "
            "active sites; make more with 'fedsign deploy add-site'."
        )
    _check_not_running(federation.server)
    if answers(federation):
        raise EngineError(
            f"another program listens at {federation.local_address}; end it, or make the federation with another "
            "--port."
        )
    programs = Programs(federation.folder / "logs")
    programs.logs.mkdir(exist_ok=True)
    try:
        # the sites' first contact needs a listening server, or each would warn and retry
        link = programs.start("superlink", [*_START, str(federation.server)])
        programs.wait_until(lambda: answers(federation), timeout_s=timeout_s, complaint="the SuperLink does not answer")
        say(f"SuperLink at {federation.local_address}, process {link}")
        # nodes of killed SuperNodes count as online for a minute; a reconnected one has a new time, so it is told apart
        before = _online(federation)
        # the kits' host name may not resolve, or not be reachable, from the server itself
        own = ["--host", federation.local_host]
        nodes = {site: programs.start(site.name, [*_START, str(federation.kit(site.name)), *own]) for site in sites}
        programs.wait_until(
            lambda: len(_online(federation) - before) >= num_sites,
            timeout_s=timeout_s,
            complaint="not all sites are online",
        )
    # Ctrl-C as well: the programs have sessions of their own and would live on
    except BaseException:
        programs.end()
        down(federation)
        raise
    for site, process in nodes.items():
        say(f"SuperNode of {site.name}, partition {site.partition}, process {process}")


def down(federation: Federation) -> list[int]:
    """Stop the SuperLink and the SuperNodes started from this folder; return their process ids."""
    ended = []
    # sites first, while there is a SuperLink that they can sign off from
    for folders in ([federation.kit(site.name) for site in federation.sites], [federation.server]):
        processes = [process for folder in folders if (process := recorded(folder / "pid")) is not None]
        end(processes)
        for folder in folders:
            # only after the end: a start in between must still see the old process
            (folder / "pid").unlink(missing_ok=True)
        ended += [process.pid for process in processes]
    return ended


def _check_accounts() -> None:
    """Refuse to open a port where other accounts of the machine could not be kept out."""
    if not tells_accounts() and INSECURE not in os.environ:
        raise EngineError(f"{BLIND}; start it elsewhere, or with {INSECURE}=1 where you trust all accounts.")


def check_trust(federation: Federation, say: Say) -> None:
    """Refuse expired certificates; warn about certificates that expire soon, and about an insecure federation."""
    if federation.insecure:
        say(UNSAFE)
        return
    if federation.plain_supernodes:
        say(PLAIN)
    _judge(ends_at(federation.certificate), "the server's certificate", say)
    _judge(ends_at(federation.authority), "the CA's certificate", say, ANEW)


def _online(federation: Federation) -> set[tuple[int, str]]:
    """Return the SuperNodes that count as online, whichever they are, and when each connected."""
    return {(node.node_id, node.last_activated_at) for node in nodes_of(federation) if node.status == "online"}


def _greet(kit: StartupKit, say: Say, host: str) -> None:
    """Check the server before Flower connects, which would retry for ever where its certificate has expired."""
    ends_at, is_reported = time.monotonic() + _AWAY_S, False
    while True:
        try:
            server = probe_server(host, kit.facts["port"], authority=kit.trusted)
            break
        # not an error: machines boot in any order
        except AwayError as error:
            if not is_reported:
                say(f"{str(error).rstrip('.')}. Trying on until it does.")
            is_reported = True
        if time.monotonic() > ends_at:
            return
        time.sleep(_POLL_S)
    # else an insecure federation, which has neither a certificate nor keys to check
    if server.certificate_ends is not None:
        _judge(server.certificate_ends, "the server's certificate", say)
        _wait_for_authentication(kit, say, host)


def _wait_for_authentication(kit: StartupKit, say: Say, host: str) -> None:
    """Wait until the SuperLink notices that the site's former SuperNode was killed."""
    ends_at, is_reported = time.monotonic() + HEARTBEAT_S + _SLACK_S, False
    while True:
        try:
            check_is_known(kit, host=host)
            return
        except StillThereError as error:
            if time.monotonic() > ends_at:
                raise
            # once: this loops every second for more than a minute
            if not is_reported:
                say(f"{error} Trying on until this site is let in.")
            is_reported = True
        time.sleep(_POLL_S)


def _judge(end: dt.datetime, name: str, say: Say, remedy: str = RENEW) -> None:
    state, how = validity(end, remedy)
    if state == "broken":
        raise ConfigError(f"{name} {how}.")
    if state == "warn":
        say(f"{name} {how}.")


def _check_not_running(folder: Path) -> None:
    process = recorded(folder / "pid")
    if process is not None and process.pid != os.getpid():
        raise EngineError(
            f"{folder} is running already, as process {process.pid}; stop that one first ('fedsign deploy down')."
        )


def _claim(folder: Path) -> None:
    """Record this process in the folder, unless one is running already. The program that it becomes keeps its id."""
    _check_not_running(folder)
    record_this_process(folder / "pid")


def _become(folder: Path, home: Path, command: list[str], server: Iterable[str] = ()) -> NoReturn:
    """Replace this process by a module; `home`: Flower's home; `server`: see `logs`."""
    logs.keep(folder, *server)
    os.execve(sys.executable, [sys.executable, "-P", "-m", *command], flower_environment(home))
