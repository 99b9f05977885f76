"""SuperLink: Flower's deployment runtime, with separate processes and messages over the network.

By default, starts a SuperLink and SuperNodes on the loopback, each serving a share of the partitions, submits the
generated app, follows the records that the ServerApp writes into the run's folder, and ends every process that it
started. Flower's home is a folder of the run, so the user's own Flower configuration is neither read nor changed.

With `engine.federation`, uses a federation that is up (`fedsign deploy`), named by its folder. The SuperLink starts the
ServerApp on its own machine, where the run's folder must be; so this process must run there too, as the same user. The
ServerApp ends when this process or the SuperLink does, so that an interrupted run can be resumed. If the SuperLink
restarts, this process submits the run again, which continues from the last checkpoint.
"""

import getpass
import logging
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import psutil
import tomli_w
from pydantic import Field

from clients import site
from clients.deployment.settings import PARTITIONS_KEY, ROOT_KEY, SHARE_KEY, SITE_KEY
from clients.node import STATE_KEY
from fedsign.config import ExperimentConfig
from fedsign.data import sites
from fedsign.errors import ConfigError, EngineError, LinkLostError
from fedsign.flower.door import BLIND, INSECURE, tells_accounts
from fedsign.flower.programs import bound, find_program, guarded
from fedsign.rules import Rule
from fedsign.storage import checkpoints
from fedsign.storage.results import RunFolder
from fedsign.workload import Workload
from simulations.deployment.engine.hooks import SUPERLINK
from simulations.deployment.engine.submission import end_server_app, submit_and_follow, tell_events
from simulations.deployment.federation import Federation, open_federation
from simulations.deployment.membership import answers, answers_at, asking, control, process_of
from simulations.deployment.probe import probe_server
from simulations.deployment.running import Programs, flower_environment, free_port
from simulations.deployment.start import check_trust
from simulations.rounds import OnRound

_LOOPBACK = "127.0.0.1"
_NUM_SUPERNODES = 3
_POLL_S = 0.5
_log = logging.getLogger("fedsign")


class LocalDeployment(Programs):
    """A local SuperLink and SuperNodes that end with this process. `home` (Flower's) and `logs` are theirs alone."""

    def __init__(self, home: Path, logs: Path, *, insecure: bool = False) -> None:
        for path in (home, logs):
            # of an earlier attempt: Flower's home would hold its database, the logs its last words
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o700)
        super().__init__(logs, flower_environment(home) | ({INSECURE: "1"} if insecure else {}))
        # chosen here, since the SuperNodes must know it before the SuperLink listens
        self.home, self._port = home, free_port()
        self.address = f"{_LOOPBACK}:{self._port}"

    def start_link(self, *, timeout_s: float) -> None:
        """Start the SuperLink, and wait until it answers."""
        link = [*guarded("superlink"), "--insecure", "--host", _LOOPBACK, "--port", str(self._port)]
        self.start("superlink", [*link, "--disable-runtime-dependency-installation"])
        complaint = "the SuperLink does not answer"
        self.wait_until(lambda: answers_at(_LOOPBACK, self._port), timeout_s=timeout_s, complaint=complaint)

    def start_node(self, name: str, own: Mapping[str, Any], *, script: str = site.__file__) -> None:
        """Start a SuperNode by a site's script or Flower's; `own` is its node configuration."""
        config = self.home / f"{name}.toml"  # as a file, since a path may contain any character
        config.write_text(tomli_w.dumps(own), encoding="utf-8")
        node = ["--insecure", "--superlink", self.address, "--host", _LOOPBACK, "--port", str(free_port())]
        self.start(name, [*bound(script), *node, "--node-config", str(config)])


class SuperLink:
    """Settings of the SuperLink engine.

    `federation`: the folder of a running federation; "" starts one for this run on this machine.
    `num_supernodes`: of this run's own federation (with `partition.name=sites`, one per site).
    `start_timeout_s`: how long the roll call waits for absent SuperNodes before the run starts without them.
    `share_details`: let SuperNodes send tracebacks and label counts, which otherwise stay with them.
    `insecure_local`: run where the system does not tell accounts apart, and let all of them start code in the run.
    """

    is_deployed = keeps_processes = True
    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule(
            lambda config: config.engine.federation and config.engine.num_supernodes != _NUM_SUPERNODES,
            "engine.num_supernodes={engine.num_supernodes} and engine.federation={engine.federation} were both given",
            "a federation has the SuperNodes of its sites: leave engine.num_supernodes out",
        ),
        Rule(
            lambda config: config.engine.federation and config.engine.share_details,
            "engine.share_details=true was given with engine.federation={engine.federation}, whose sites decide that",
            "start those that share with --node-config 'share-details=true', and leave engine.share_details out",
        ),
    )

    def __init__(
        self,
        *,
        num_supernodes: Annotated[int, Field(gt=0)] = _NUM_SUPERNODES,
        start_timeout_s: Annotated[float, Field(gt=0)] = 300.0,
        share_details: bool = False,
        federation: str = "",
        insecure_local: bool = False,
    ) -> None:
        self.federation = federation
        self.num_supernodes = num_supernodes
        self.start_timeout_s = start_timeout_s
        self.share_details = share_details
        self.insecure_local = insecure_local

    @staticmethod
    def requirement() -> tuple[str, str]:
        """Return the row of `fedsign doctor`."""
        try:
            return "ok", find_program("flower-superlink")
        except EngineError as error:
            return "broken", str(error)

    def check(self, workload: Workload) -> None:
        """Check what cannot run over messages."""
        if not (self.insecure_local or self.federation or tells_accounts()):
            raise EngineError(
                f"{BLIND}: they could start code in this run; use an engine without ports, such as in_process or "
                "workers, or set engine.insecure_local=true where you trust all accounts."
            )
        if self.federation:
            federation = open_federation(Path(self.federation))
            _check_fits(federation, workload.config.partition.num_clients, workload.config.server.min_replies)
            _check_is_up(federation)

    def execute(self, workload: Workload, folder: RunFolder, on_round: OnRound) -> None:
        """Execute the run on the named federation, or on one started for it."""
        if self.federation:
            _run_on(
                open_federation(Path(self.federation)),
                workload.config,
                folder,
                on_round,
                patience_s=self.start_timeout_s,
            )
            return
        local = LocalDeployment((folder.path / "flower").resolve(), folder.path / "logs", insecure=self.insecure_local)
        try:
            local.start_link(timeout_s=self.start_timeout_s)
            # without waiting for each: the roll call waits for all
            for index, own in enumerate(self._node_configs(workload.config, folder)):
                local.start_node(f"supernode-{index}", own)
            with control(local.address, authority=None) as link:
                check, home = local.check_alive, local.home
                submit_and_follow(workload.config, folder, on_round, link=link, home=home, check_alive=check)
        finally:
            local.end()

    def _node_configs(self, config: ExperimentConfig, folder: RunFolder) -> Iterator[dict[str, Any]]:
        """Return the node configuration of each SuperNode; only its own one is told a site's folder."""
        num_clients = config.partition.num_clients
        # a SuperNode reads one data root, so that each site needs its own
        num_nodes = num_clients if sites.has_sites(config) else min(self.num_supernodes, num_clients)
        for node in range(num_nodes):
            own: dict[str, Any] = {
                # dealt in turn: cohorts of neighboring ids spread over all SuperNodes
                PARTITIONS_KEY: ",".join(map(str, range(node, num_clients, num_nodes))),
                STATE_KEY: str(folder.clients.resolve()),
                SHARE_KEY: self.share_details,
            }
            if sites.has_sites(config):
                root = sites.root_of(config, node)
                own[ROOT_KEY] = str(Path(root).expanduser().resolve()) if root else ""
                own[SITE_KEY] = sites.name_of(config, node)
            yield own


def _run_on(
    federation: Federation, config: ExperimentConfig, folder: RunFolder, on_round: OnRound, *, patience_s: float
) -> None:
    """Execute a run; if the SuperLink went away and is back, continue from the last checkpoint.

    Raises:
        LinkLostError: the SuperLink does not come back in time.
    """
    while True:
        process = process_of(federation)
        check, home = partial(_check_same_link, federation, process), federation.server / "flower"
        try:
            with asking(federation) as link:
                submit_and_follow(config, folder, on_round, link=link, home=home, check_alive=check)
        except LinkLostError:
            # psutil compares start times as well as ids
            if process_of(federation) == process:
                raise  # it is up, but does not answer
            _log.warning(
                "the SuperLink stopped during the run; restart it within %g s to continue the run: %s",
                patience_s,
                federation.server / "start.sh",
            )
            # Before the rewind: the old ServerApp may still append records. It may outlive its SuperLink by a moment.
            _wait_for(federation, folder, patience_s)
            end_server_app(folder)
            round = checkpoints.rewind(folder)
            event = {"site": SUPERLINK, "event": "restarted", "why": f"the run continues after round {round}"}
            # after the rewind, which has dropped events that were told already
            num_events = len(folder.records("members.jsonl"))
            folder.append("members.jsonl", {"round": round + 1, **event})
            tell_events(folder, num_events)
        else:
            return


def _wait_for(federation: Federation, folder: RunFolder, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while process_of(federation) is None or not answers(federation):
        if time.monotonic() > deadline:
            raise LinkLostError(
                "the SuperLink ended in the middle of the run, and was not started again within "
                f"engine.start_timeout_s={patience_s:g}; start it, and resume with 'fedsign run --resume "
                f"{shlex.quote(str(folder.path))}'."
            )
        time.sleep(_POLL_S)


def _check_same_link(federation: Federation, before: psutil.Process | None) -> None:
    """Raise LinkLostError if the SuperLink's process has ended, even if another one has replaced it."""
    if process_of(federation) != before:
        raise LinkLostError("the SuperLink ended in the middle of the run.")


def _check_fits(federation: Federation, num_clients: int, min_replies: int) -> None:
    """Raise ConfigError unless each client belongs to a site, and enough sites are active."""
    served, known = {site.partition for site in federation.active}, {site.partition for site in federation.sites}
    without = [partition for partition in range(num_clients) if partition not in known]
    if without:
        raise ConfigError(
            f"partition.num_clients={num_clients} was given, but {without[:5]} are no partitions of a site of the "
            f"federation {federation.name}, which has {sorted(known)}; add sites with 'fedsign deploy add-site', or "
            "set partition.num_clients."
        )
    num_active = len(served.intersection(range(num_clients)))
    if num_active < min_replies:
        raise ConfigError(
            f"server.min_replies={min_replies} was given, but {num_active} of the run's {num_clients} sites are "
            "active, the others revoked; add sites with 'fedsign deploy add-site', or lower server.min_replies."
        )
    if num_active < num_clients:
        _log.warning(
            "%d of the run's %d sites are revoked; the run continues without them.",
            num_clients - num_active,
            num_clients,
        )
    if len(served) > num_clients:
        _log.warning(
            "partition.num_clients=%d: %d of the federation's %d sites take no part in this run.",
            num_clients, len(served) - num_clients, len(served),
        )  # fmt: skip


def _check_is_up(federation: Federation) -> None:
    """Raise unless the SuperLink is a process of this machine and user, with a certificate of the federation's CA."""
    check_trust(federation, _log.warning)
    process = process_of(federation)
    if process is None:
        raise EngineError(
            f"the federation {federation.name} is not up on this machine: start {federation.server / 'start.sh'}, or "
            "try it out with 'fedsign deploy up'; a run is started on the SuperLink's own machine."
        )
    if process.uids().real != os.getuid():
        other = process.username()
        raise EngineError(
            f"the SuperLink runs as user {other}, who writes the run's folder, but this is {getpass.getuser()}; run "
            f"this command as {other} too: sudo -u {other} fedsign run ..."
        )
    # another program may listen on the port of a SuperLink that is still starting
    probe_server(federation.local_host, federation.port, authority=federation.trusted)
