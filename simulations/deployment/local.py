"""`fedsign deploy up` and `down`: a federation's server and kits as processes of this machine, for trying out."""

import sys
from collections.abc import Callable
from pathlib import Path

from fedsign.errors import ConfigError, EngineError
from simulations.deployment.federation import Federation
from simulations.deployment.membership import answers, online_since, process_of
from simulations.deployment.running import Programs, end, recorded


def up(federation: Federation, num_sites: int, *, timeout_s: float, say: Callable[[str], None]) -> None:
    """Start the SuperLink and the first sites' SuperNodes, and wait until they are online.

    Raises:
        ConfigError: the federation has fewer sites, or one of the kits lies elsewhere.
        EngineError: one of them ends or does not answer in time; all are ended.
    """
    sites = federation.active[:num_sites]
    if len(sites) < num_sites:
        raise ConfigError(
            f"--local {num_sites} was given, but the federation {federation.name} has {len(federation.active)} active sites; make "
            "more with 'fedsign deploy add-site'."
        )
    check_nothing_runs(federation)
    programs = Programs(federation.folder / "logs")
    programs.logs.mkdir(exist_ok=True)
    try:
        link = _start(programs, federation, "superlink", federation.server)
        programs.wait_until(lambda: answers(federation), timeout_s=timeout_s, complaint="the SuperLink does not answer")
        say(f"SuperLink at {federation.local_address}, process {link}")
        before = online_since(federation).items()
        nodes = {site: _start(programs, federation, site.name, federation.kit(site.name)) for site in sites}
        programs.wait_until(
            lambda: len(online_since(federation).items() - before) >= num_sites,
            timeout_s=timeout_s,
            complaint="not all sites are online",
        )
    except BaseException:
        programs.end()
        down(federation)
        raise
    for site, process in nodes.items():
        say(f"SuperNode of {site.name}, partition {site.partition}, process {process}")


def down(federation: Federation) -> list[int]:
    """End the SuperLink and the SuperNodes that were started from this folder; returns their process ids."""
    ended = []
    # sites first, so that there is somebody to whom they can say that they leave
    for folders in ([federation.kit(site.name) for site in federation.sites], [federation.server]):
        found = [process for folder in folders if (process := recorded(folder / "pid")) is not None]
        end(found)
        for folder in folders:
            (folder / "pid").unlink(missing_ok=True)
        ended += [process.pid for process in found]
    return ended


def check_nothing_runs(federation: Federation) -> None:
    """Raise EngineError when it is up already, or another program has the port."""
    process = process_of(federation)
    if process is not None:
        raise EngineError(f"the federation is up already, as process {process.pid}; end it with 'fedsign deploy down'.")
    if answers(federation):
        raise EngineError(
            f"another program listens at {federation.local_address}; end it, or make the federation with another --port."
        )


def _start(programs: Programs, federation: Federation, name: str, folder: Path) -> int:
    address = [] if folder == federation.server else ["--host", federation.local_host]
    return programs.start(
        name, [sys.executable, "-P", "-m", "simulations.cli", "deploy", "start", str(folder), *address]
    )
