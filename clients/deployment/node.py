"""A SuperNode's own configuration: its clients, data, device, and what it shares with the server.

    flower-supernode ... --node-config 'partition-id=0 site="charite" data-root="/srv/data" device="cuda:0"'

- `partition-id` (Flower's name) or `partitions` ("0,3,6"): the clients that it serves
- `data-root`: the location of its data, overrides the experiment
- `site`: its name in reports
- `device`: overrides `engine.device`
- `state-root`: the location of client states

Capabilities add settings (`clients.deployment.settings`), such as `sharding-machines`.

[Note: what stays at a node] A failure is sent as the error's class and one sentence.  The traceback, which may contain
a site's own code, goes to the node's log.  Label counts stay at the node as well.  `share-details=true` sends both.

[Note: where states lie] Client states are below `state-root`, `$FLWR_HOME`, or `~/.fedsign`, in a folder named after
the run, which does not change when the run is resumed.  A SuperNode that the engine started on its own machine gets the
run's folder as `state-folder`.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from clients.app import Handler
from clients.deployment import settings
from clients.deployment.evaluator import SiteEvaluator
from clients.node import RUN_KEY, STATE_KEY, Node
from clients.rehearsal import rehearse
from clients.state.store import ClientStore
from fedsign.config import ExperimentConfig, from_toml
from fedsign.data import sites
from fedsign.data.client_data import at_root
from fedsign.errors import ConfigError
from fedsign.flower.evaluation import EVALUATE, answered
from fedsign.flower.shims import PARTITION_KEY
from fedsign.records import Failure
from fedsign.traits import OptimizerTraits
from fedsign.workload import Workload

TOKENIZER_KEY = "tokenizer"  # in the roll call's question: the fingerprint of the server's tokenizer
COUNTS_KEY = "counts"  # in its answer: label counts
CONSENTS_KEY = "consents"  # in its answer: what the site has consented to

_log = logging.getLogger("fedsign")


@dataclass(frozen=True)
class SuperNode(Node):
    """A SuperNode of a deployment, configured by its command line."""

    def __post_init__(self) -> None:
        """Raises: ConfigError: a value is invalid."""
        if not isinstance(self._own.get(settings.SHARE_KEY, False), bool):
            raise ConfigError(
                f"the node's {settings.SHARE_KEY}={self._own[settings.SHARE_KEY]} was given, "
                "but expected true or false."
            )

    @property
    def _own(self) -> Mapping[str, Any]:
        return self.context.node_config

    @property
    def partitions(self) -> tuple[int, ...]:
        """The clients that it serves.

        Raises:
            ConfigError: none are configured.
        """
        if settings.PARTITIONS_KEY in self._own:
            return tuple(int(item) for item in str(self._own[settings.PARTITIONS_KEY]).split(","))
        if PARTITION_KEY in self._own:
            return (int(self._own[PARTITION_KEY]),)
        raise ConfigError(
            f"node {self.context.node_id} has no partition: "
            "start its SuperNode with --node-config 'partition-id=K', K from 0."
        )

    @property
    def workload(self) -> Workload:
        """The experiment with this node's own settings."""
        return workload_of(self.experiment, self.partitions, tuple(self._own.items()))

    @property
    def states(self) -> ClientStore:
        """The store of client states; see [Note: where states lie].

        Raises:
            ConfigError: the run's name is not a valid folder name.
        """
        run = str(self.context.run_config.get(RUN_KEY, ""))
        if STATE_KEY in self._own:
            return ClientStore(Path(str(self._own[STATE_KEY])), run=run)
        if settings.STATE_ROOT_KEY in self._own:
            root = Path(str(self._own[settings.STATE_ROOT_KEY])).expanduser()
        else:
            root = Path(os.environ.get("FLWR_HOME") or Path.home() / ".fedsign") / "clients"
        # the name comes from the server, and must not lead out of the folder
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", run):
            raise ConfigError(
                f"the run is called '{run}', which can be no folder's name; run it with this version of FedSign."
            )
        return ClientStore(root / run, run=run)

    def answer_roll_call(self, question: Mapping[str, object]) -> Mapping[str, str]:
        """Answer the roll call; a site reads its data, so that problems surface before the first round."""
        workload = self.workload
        answer = {CONSENTS_KEY: ", ".join(consents)} if (consents := settings.consents(self._own)) else {}
        if not sites.lies_at_nodes(workload.config):
            return answer
        sites.check_tokenizer(workload.config, workload.dataset.text, str(question.get(TOKENIZER_KEY, "")))
        for sentence in workload.dataset.read_as:
            _log.info("%s", sentence)
        for note in workload.dataset.notes:
            _log.warning("%s", note)  # notes and findings about a node's data stay in its own log
        for record in [*workload.check_data(), *rehearse(workload)]:
            _log.warning("%s; %s.", record["message"], record["remedy"])
        if not self._own.get(settings.SHARE_KEY):
            return answer
        return answer | {COUNTS_KEY: json.dumps({site: workload.counts_of(site) for site in self.partitions})}

    def reported(self, failure: Failure) -> Failure:
        """A failure without details, which are logged here; see [Note: what stays at a node]."""
        if self._own.get(settings.SHARE_KEY):
            return failure
        _log.error("client %d failed: %s\n%s", failure.partition, failure.reason, failure.details)
        return replace(failure, details="")


@lru_cache(maxsize=2)  # a process handles many messages
def workload_of(experiment: str, partitions: tuple[int, ...], own: tuple[tuple[str, Any], ...]) -> Workload:
    """The experiment with a node's own settings."""
    config, given = from_toml(experiment), dict(own)
    changes = {path: given[key] for _, _, key, path in settings.node_keys() if key in given}
    for table in settings.site_tables().values():
        if any(key in given for name, _, key, _ in settings.node_keys() if name == table.name):
            # once a site sets a key of a table, consents in the experiment no longer count: only its own do
            changes = {f"{table.section}.{key}": False for key in table.consents} | changes
    if given.get(settings.DEVICE_KEY):
        changes["engine.device"] = given[settings.DEVICE_KEY]
    start, optimizer = config.model.start, OptimizerTraits.of(config.client.optimizer.name)
    # adapters stand on a base that every process builds, and that is never sent
    if start and not Path(start).exists() and optimizer.adapt_model is None:
        _log.warning("model.start=%s is not here; the server sends all weights, frozen ones too.", start)
        changes["model.start"] = ""
    root = str(given.get(settings.ROOT_KEY, ""))
    here = None
    if sites.lies_at_nodes(config):
        _check_sites(config, partitions, root)
        changes |= _own_names(config, partitions, str(given.get(settings.SITE_KEY, "")))
        here = frozenset(partitions)
    config = config.replace(**changes)
    return Workload(at_root(config, root, here) if root else config, here)


def _check_sites(config: ExperimentConfig, partitions: tuple[int, ...], root: str) -> None:
    """Raise ConfigError unless each site of a node has its own folder and belongs to the experiment."""
    if root and len(partitions) > 1:
        raise ConfigError(
            f"a node with one {settings.ROOT_KEY} serves the sites {list(partitions)}; "
            f"start a SuperNode for each, with its own {settings.ROOT_KEY}."
        )
    num_clients = config.partition.num_clients
    for site in partitions:
        if not 0 <= site < num_clients:
            raise ConfigError(
                f"a node serves site {site}, but there are {num_clients}, from 0 on; correct its partition-id, or "
                "partition.num_clients."
            )


def _own_names(config: ExperimentConfig, partitions: tuple[int, ...], name: str) -> dict[str, Any]:
    """Names of the sites, never derived from their folders; the server's test folder is not used here."""
    names = [*config.partition.settings["names"]] or [""] * config.partition.num_clients
    for site in partitions:
        names[site] = name or names[site]
    return {
        "partition.names": [name or f"site {site}" for site, name in enumerate(names)],
        "partition.test_root": "",
    }


HANDLERS: dict[str, Handler] = {  # evaluation on a site's own samples
    EVALUATE: lambda message, node: answered(message, SiteEvaluator(node.at_work()).evaluate)
}
