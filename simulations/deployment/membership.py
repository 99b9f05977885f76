"""Which keys the SuperLink takes: made equal to the sites in federation.toml, by `flwr supernode`.

Flower keeps the key of a site that was unregistered and takes it never again, as long as its database is kept.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsign.errors import EngineError
from fedsign.storage.disk import write_text
from simulations.deployment.federation import Federation, Site
from simulations.deployment.programs import (
    CONNECTION,
    answer_of,
    answers_at,
    call_flwr,
    complaint_of,
    flower_environment,
    write_connection,
)
from simulations.deployment.running import Process, recorded

_GONE = ("unregistered", "deleted")


def home_of(federation: Federation) -> Path:
    """Flower's own folder on the server's machine."""
    return federation.server / "flower"


def state_of(federation: Federation) -> Path:
    """Where the SuperLink's memory lies."""
    return federation.server / "state"


def process_of(federation: Federation) -> Process | None:
    """The SuperLink's process, if it was started here and is alive."""
    return recorded(federation.server / "pid")


def answers(federation: Federation) -> bool:
    """Whether something listens on the server's port."""
    return answers_at(federation.local_host, federation.port)


def environment_of(federation: Federation) -> dict[str, str]:
    """For `flwr`, with the connection written for where the folder lies now."""
    home = home_of(federation)
    write_connection(home, federation.local_address, authority=None if federation.insecure else federation.authority)
    return flower_environment(home)


def register_sites(federation: Federation) -> None:
    """Register the active sites, unregister the revoked ones; what is as it should be is left alone.

    Raises:
        EngineError: the SuperLink refuses.
    """
    if federation.insecure:
        return  # every SuperNode is taken, with or without a key
    with _alone(federation):
        environment = environment_of(federation)
        taken = {node: status for node, status in _statuses(environment).items() if status not in _GONE}
        nodes = nodes_of(federation)
        for site in federation.sites:
            is_taken = nodes.get(site.name) in taken
            if site.is_active and not is_taken:
                nodes[site.name] = _register(federation, site, environment)
                _write_nodes(federation, nodes)
            elif not site.is_active and is_taken:
                _call(["unregister", nodes[site.name]], environment, what=f"unregister {site.name}")


def statuses(federation: Federation) -> dict[str, str]:
    """Site -> Flower's word for it: registered (never seen), online, offline, unregistered."""
    found = _statuses(environment_of(federation))
    return {name: found.get(node, "unknown") for name, node in nodes_of(federation).items()}


def online_since(federation: Federation) -> dict[str, str]:
    """Node id -> when it came, of the SuperNodes that the SuperLink believes to be online, whoever they are.

    One that was struck down is believed to be, for a minute or two; also by a SuperLink that was itself away meanwhile.
    """
    answer = _call(["list"], environment_of(federation), what="list the sites")
    return {str(node["node-id"]): str(node["online-at"]) for node in answer["nodes"] if node["status"] == "online"}


def nodes_of(federation: Federation) -> dict[str, str]:
    """Site -> the id that Flower gave it."""
    try:
        return dict(json.loads((state_of(federation) / "nodes.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _register(federation: Federation, site: Site, environment: dict[str, str]) -> str:
    public = federation.server / "keys" / f"{site.name}.pub"
    public.parent.mkdir(exist_ok=True)
    public.write_text(site.public_key + "\n", encoding="utf-8")
    answer = _call(["register", str(public), "--name", site.name], environment, what=f"register {site.name}")
    return str(answer["node-id"])


def _statuses(environment: dict[str, str]) -> dict[str, str]:
    answer = _call(["list"], environment, what="list the sites")
    return {str(node["node-id"]): str(node["status"]) for node in answer["nodes"]}


def _call(arguments: list[str], environment: dict[str, str], *, what: str) -> dict[str, Any]:
    command, *rest = arguments
    done = call_flwr(["supernode", command, *rest, CONNECTION, "--format", "json"], environment)
    answer = answer_of(done)
    if not answer.get("success"):
        raise EngineError(f"the SuperLink could not {what}: {complaint_of(done)}")
    return answer


def _write_nodes(federation: Federation, nodes: dict[str, str]) -> None:
    write_text(state_of(federation) / "nodes.json", json.dumps(nodes, indent=1) + "\n")


@contextmanager
def _alone(federation: Federation) -> Iterator[None]:
    """One command at a time: the next one waits."""
    state = state_of(federation)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (state / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
