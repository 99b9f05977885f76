"""`fedsign deploy start`: become Flower's SuperLink or SuperNode, with what the folder says.

The start scripts and systemd's units come through here, so that an expired certificate and a key that others can
read are refused before anything listens, and in a sentence.
"""

import datetime as dt
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import tomli_w

from fedsign.errors import ConfigError, EngineError
from fedsign.storage.disk import is_private
from simulations.deployment.authority import ends_at, validity
from simulations.deployment.federation import Federation, with_port
from simulations.deployment.kits import Kit
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
    state_of(federation).mkdir(parents=True, exist_ok=True, mode=0o700)
    write_connection(
        home_of(federation), federation.local_address, authority=None if federation.insecure else federation.authority
    )
    _become(
        [
            sys.executable,
            "-P",
            "-m",
            "simulations.deployment.gate",
            str(federation.folder),
            *server_arguments(federation, say),
        ],
        flower_environment(home_of(federation)),
        record=federation.server / "pid",
    )


def server_arguments(federation: Federation, say: Say) -> list[str]:
    """Of flower-superlink."""
    arguments = [
        "--host", federation.bind, "--port", str(federation.port), "--database", str(state_of(federation) / "superlink.sqlite"),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    if federation.insecure:
        say(UNSAFE)
        return [*arguments, "--insecure"]
    check_certificate(federation, say)
    key = federation.server / "server.key"
    check_key(key)
    return [
        *arguments, "--ssl-certfile", str(federation.certificate), "--ssl-keyfile", str(key),
        "--ssl-ca-certfile", str(federation.authority), "--enable-supernode-auth",
    ]  # fmt: skip


def start_site(kit: Kit, say: Say, *, host: str | None = None) -> NoReturn:
    """Become the SuperNode; `host`: connect to this name of the server instead of the kit's.

    Raises:
        ConfigError: the key is missing or readable for others.
        ServerError: the server is not the one that the CA vouches for.
    """
    _check_not_running(kit.folder)
    arguments = site_arguments(kit, say, host=host or kit.facts["host"])
    config = kit.folder / "node.toml"
    config.write_text(tomli_w.dumps(kit.node_config()), encoding="utf-8")
    _become(
        [sys.executable, "-P", "-m", "clients.site", *arguments, "--node-config", str(config)],
        flower_environment(kit.folder / "flower"),
        record=kit.folder / "pid",
    )


def site_arguments(kit: Kit, say: Say, *, host: str) -> list[str]:
    """Of flower-supernode, but for its node configuration."""
    insecure, port = kit.facts["insecure"], kit.facts["port"]
    arguments = ["--superlink", with_port(host, port), "--host", "127.0.0.1", "--port", str(free_port())]
    if insecure:
        say(UNSAFE)
    else:
        check_key(kit.key)
    _greet(kit, say, host)
    if insecure:
        return [*arguments, "--insecure"]
    return [*arguments, "--root-certificates", str(kit.authority), "--auth-supernode-private-key", str(kit.key)]


def _greet(kit: Kit, say: Say, host: str) -> None:
    """Look at the server before Flower does; one that is not there yet is waited for by Flower."""
    insecure = kit.facts["insecure"]
    try:
        seen = look_at_server(host, kit.facts["port"], authority=None if insecure else kit.authority)
    except ServerError as error:
        if error.is_final:
            raise
        say(f"{str(error).rstrip('.')}. Trying on until it does.")
        return
    if seen.certificate_ends is not None:
        from simulations.deployment.knock import NOT_TAKEN, is_known  # Flower, which takes seconds

        _judge(seen.certificate_ends, "the server's certificate", say)
        if is_known(kit, host=host) is False:
            raise EngineError(NOT_TAKEN)


def check_certificate(federation: Federation, say: Say) -> None:
    """Refuse what is over, and warn of what ends soon."""
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


def check_key(key: Path) -> None:
    """Raise ConfigError unless it is there, and for its owner alone."""
    if not key.exists():
        raise ConfigError(
            f"{key} is missing; put the site's private key there, or make one with 'fedsign deploy key' and send its public half."
        )
    if not is_private(key):
        raise ConfigError(f"{key} can be read by others; make it private with 'chmod 600 {key}'.")


def _check_not_running(folder: Path) -> None:
    process = recorded(folder / "pid")
    if process is not None and process.pid != os.getpid():
        raise EngineError(f"{folder} is running already, as process {process.pid}; stop that one first.")


def _become(command: list[str], environment: Mapping[str, str], *, record: Path) -> NoReturn:
    record_this_process(record)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, dict(environment))
