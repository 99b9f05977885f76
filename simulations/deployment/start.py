"""`fedsign deploy start`: become Flower's SuperLink or SuperNode, with what the folder says.

The start scripts and systemd's units come through here, so that an expired certificate and a key that others can
read are refused before anything listens, and in a sentence.
"""

import datetime as dt
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import tomli_w

from fedsign.errors import ConfigError, EngineError
from fedsign.storage.disk import is_private
from simulations.deployment.authority import ends_at, validity
from simulations.deployment.federation import Federation, with_port
from simulations.deployment.keys import load_private
from simulations.deployment.kits import Kit
from simulations.deployment.knock import check_is_known
from simulations.deployment.membership import home_of, state_of
from simulations.deployment.programs import flower_environment, free_port, write_connection
from simulations.deployment.running import record_this_process, recorded
from simulations.deployment.tls import ServerError, look_at_server

Say = Callable[[str], None]
UNSAFE = (
    "this federation is insecure, as was asked for with --insecure: what it sends can be read and changed on its way, and any "
    "machine may take part. For trying out only."
)


def start_server(federation: Federation, say: Say) -> NoReturn:
    """Become the SuperLink.

    Raises:
        ConfigError: the certificate is over, or a key is readable for others.
    """
    _check_not_running(federation.server)
    state, key = state_of(federation), federation.server / "server.key"
    arguments = [
        "--host", federation.bind, "--port", str(federation.port), "--database", str(state / "superlink.sqlite"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    check_trust(federation, say)
    if federation.insecure:
        arguments.append("--insecure")
    elif not key.exists() or not is_private(key):
        raise ConfigError(f"{key} is missing or can be read by others; restore it, or make it private with chmod 600.")
    else:
        arguments += [
            "--ssl-certfile", str(federation.certificate), "--ssl-keyfile", str(key),
            "--ssl-ca-certfile", str(federation.authority), "--enable-supernode-auth",
        ]  # fmt: skip
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_connection(home_of(federation), federation.local_address, authority=federation.trusted)
    gate = ["simulations.deployment.gate", str(federation.folder)]
    _become(federation.server, home_of(federation), [*gate, *arguments])


def start_site(kit: Kit, say: Say, *, host: str | None = None) -> NoReturn:
    """Become the SuperNode; `host`: connect to this name of the server instead of the kit's.

    Raises:
        ConfigError: the key is missing or readable for others.
        ServerError: the server is not the one that the CA vouches for.
    """
    _check_not_running(kit.folder)
    host = host or kit.facts["host"]
    trust = ["--insecure"]
    if kit.trusted is None:
        say(UNSAFE)
    else:
        load_private(kit.key)
        trust = ["--root-certificates", str(kit.trusted), "--auth-supernode-private-key", str(kit.key)]
    _greet(kit, say, host)
    config = kit.folder / "node.toml"
    config.write_text(tomli_w.dumps(kit.node_config()), encoding="utf-8")
    address = ["--superlink", with_port(host, kit.facts["port"]), "--host", "127.0.0.1", "--port", str(free_port())]
    arguments = ["clients.site", *address, *trust, "--node-config", str(config)]
    _become(kit.folder, kit.folder / "flower", arguments)


def _greet(kit: Kit, say: Say, host: str) -> None:
    """Look at the server before Flower does; one that is not there yet is waited for by Flower."""
    try:
        seen = look_at_server(host, kit.facts["port"], authority=kit.trusted)
    except ServerError as error:
        if error.is_final:
            raise
        say(f"{str(error).rstrip('.')}. Trying on until it does.")
        return
    if seen.certificate_ends is not None:
        _judge(seen.certificate_ends, "the server's certificate", say)
        check_is_known(kit, host=host)


def check_trust(federation: Federation, say: Say) -> None:
    """Refuse certificates that are over, warn of what ends soon and of a federation that has none."""
    if federation.insecure:
        say(UNSAFE)
        return
    for path, what in (
        (federation.certificate, "the server's certificate"),
        (federation.authority, "the CA's certificate"),
    ):
        _judge(ends_at(path), what, say)


def _judge(end: dt.datetime, what: str, say: Say) -> None:
    state, how = validity(end)
    if state == "broken":
        raise ConfigError(f"{what} {how}.")
    if state == "warn":
        say(f"{what} {how}.")


def _check_not_running(folder: Path) -> None:
    process = recorded(folder / "pid")
    if process is not None and process.pid != os.getpid():
        raise EngineError(f"{folder} is running already, as process {process.pid}; stop that one first.")


def _become(folder: Path, home: Path, command: list[str]) -> NoReturn:
    """Let a module take this process's place, which is recorded in the folder; `home`: Flower's."""
    record_this_process(folder / "pid")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", *command], flower_environment(home))
