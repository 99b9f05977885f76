"""A run on a federation that is up: `engine.federation` names its folder (`fedsign deploy`).

The SuperLink starts the ServerApp on its own machine, where the run's folder has to lie; so this runs there too, and
under the same user.  The ServerApp ends when this process does, so that a run that was killed can be resumed.
"""

import getpass
import logging
import os
from pathlib import Path

from fedsign.errors import ConfigError, EngineError
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations.deployment.engine.submission import play
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.membership import asking, process_of
from simulations.deployment.start import check_trust
from simulations.deployment.tls import ServerError, look_at_server
from simulations.rounds import OnRound

_log = logging.getLogger("fedsign")


def check(path: Path, num_clients: int) -> None:
    """Before a run, whether the federation is there for it.

    Raises:
        ConfigError: it does not fit the experiment, or is not to be trusted.
        EngineError: it is not up on this machine.
    """
    federation = open_federation(path)
    check_fits(federation, num_clients)
    check_is_up(federation)


def execute(path: Path, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
    """Submit the run to the SuperLink of a federation's folder, and follow it to its end.

    Raises:
        EngineError: it refuses, or ends in the middle of the run.
    """
    federation = open_federation(path)

    def check_alive() -> None:
        if process_of(federation) is None:
            raise EngineError("the SuperLink ended in the middle of the run; start it again, and go on with --resume.")

    with asking(federation) as link:
        play(workload.config, folder, on_round, link=link, check_alive=check_alive)


def check_fits(federation: Federation, num_clients: int) -> None:
    """Raise ConfigError unless each client is an active site's."""
    served = {site.partition for site in federation.active}
    without = [partition for partition in range(num_clients) if partition not in served]
    if without:
        raise ConfigError(
            f"partition.num_clients={num_clients} was given, but {without[:5]} are no partitions of an active site of the federation "
            f"{federation.name}, which has {sorted(served)}; add sites with 'fedsign deploy add-site', or set partition.num_clients."
        )
    if len(served) > num_clients:
        _log.warning(
            "partition.num_clients=%d: %d of the federation's %d sites take no part in this run.",
            num_clients, len(served) - num_clients, len(served),
        )  # fmt: skip


def check_is_up(federation: Federation) -> None:
    """Raise unless the SuperLink is a process of this machine and this user, and the one that the CA vouches for."""
    check_trust(federation, _log.warning)
    process = process_of(federation)
    if process is None:
        raise EngineError(
            f"the federation {federation.name} is not up on this machine: start {federation.server / 'start.sh'}, or try it out with "
            "'fedsign deploy up'; a run is started on the SuperLink's own machine."
        )
    if process.uids().real != os.getuid():
        other = process.username()
        raise EngineError(
            f"the SuperLink runs as user {other}, who writes the run's folder, but this is {getpass.getuser()}; run this command "
            f"as {other} too: sudo -u {other} fedsign run ..."
        )
    try:
        look_at_server(federation.local_host, federation.port, authority=federation.trusted)
    except ServerError as error:
        raise EngineError(str(error)) from error
