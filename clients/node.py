"""What a node decides for itself, by its own configuration: which data it serves, where, on which device, and what it tells.

    flower-supernode ... --node-config 'partition-id=0 site="charite" data-root="/srv/data" device="cuda:0"'

`partition-id` (Flower's name) or `partitions` ("0,3,6") say which clients it is.  `data-root` is where its data lie, which
wins over whatever the experiment says; `site` is what it is called in reports; `device` wins over `engine.device`;
`state-root` is where its clients' states are kept.  `sharding-machines`, `sharding-listen` and `sharding-secret-file` win over
what `client.sharding` says of the machines that a client's ranks are on.

[Note: what stays at a node] On a deployment (`engine.name=superlink`) a failure travels as its error's class and one
sentence; the traceback, which may hold lines of a site's own code, goes to the node's log.  Counts of labels stay too.
With `share-details=true` a node sends both.

[Note: where states lie] On a deployment below `state-root`, or else in Flower's home (`$FLWR_HOME`) or `~/.fedsign`, in a
folder of the run's own name, which stays the same when it is resumed.  Engines that start nodes on this machine name the
folder itself, in the run's: `state-folder`, in the node's configuration or (Ray) in the run's.
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from flwr.app import Context

from clients.state.store import ClientStore
from fedsign import plugins
from fedsign.config import ExperimentConfig, from_toml
from fedsign.data import sites
from fedsign.data.client_data import rooted
from fedsign.errors import ConfigError
from fedsign.flower.shims import PARTITION_KEY
from fedsign.records import Failure
from fedsign.workload import Workload

PARTITIONS_KEY, ROOT_KEY, SITE_KEY, DEVICE_KEY = (
    "partitions",
    "data-root",
    "site",
    "device",
)  # in a node's configuration
SHARDING_KEYS = {name: f"sharding-{name.replace('_', '-')}" for name in ("machines", "listen", "secret_file")}
STATE_ROOT_KEY, SHARE_KEY = "state-root", "share-details"
EXPERIMENT_KEY, STATE_KEY, RUN_KEY = "experiment", "state-folder", "run"  # in the run configuration

_log = logging.getLogger("fedsign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node's configuration."""

    partitions: tuple[int, ...]
    data_root: str = ""
    site: str = ""
    device: str = ""
    state_root: str = ""
    state_folder: str = ""
    shares_details: bool = False
    sharding: tuple[tuple[str, str | int], ...] = ()  # settings of client.sharding, and what they are here

    @classmethod
    def of(cls, context: Context) -> Self:
        """From what its SuperNode was started with.

        Raises:
            ConfigError: it names no partition, or a value cannot be used.
        """
        given = context.node_config
        shares = given.get(SHARE_KEY, False)
        if not isinstance(shares, bool):
            raise ConfigError(f"the node's {SHARE_KEY}={shares} was given, but expected is true or false.")
        return cls(
            partitions=_partitions(given, context.node_id),
            data_root=str(given.get(ROOT_KEY, "")),
            site=str(given.get(SITE_KEY, "")),
            device=str(given.get(DEVICE_KEY, "")),
            state_root=str(given.get(STATE_ROOT_KEY, "")),
            state_folder=str(given.get(STATE_KEY, "")),
            shares_details=shares,
            sharding=_own_sharding(given),
        )

    def workload(self, context: Context) -> Workload:
        """The experiment as this node plays it."""
        return _workload(str(context.run_config[EXPERIMENT_KEY]), self)

    def states(self, context: Context, config: ExperimentConfig) -> ClientStore:
        """See [Note: where states lie].

        Raises:
            ConfigError: the run has no name that can be a folder's.
        """
        if self.state_folder:
            return ClientStore(Path(self.state_folder))
        if not is_deployed(config):
            return ClientStore(Path(str(context.run_config[STATE_KEY])))
        if self.state_root:
            root = Path(self.state_root).expanduser()
        else:
            root = Path(os.environ.get("FLWR_HOME") or Path.home() / ".fedsign") / "clients"
        run = str(context.run_config.get(RUN_KEY, ""))
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", run):
            raise ConfigError(
                f"the run is called '{run}', which can be no folder's name; run it with this version of FedSign."
            )
        return ClientStore(root / run)

    def tells(self, config: ExperimentConfig) -> bool:
        """Whether details travel; see [Note: what stays at a node]."""
        return self.shares_details or not is_deployed(config)

    def told(self, failure: Failure, config: ExperimentConfig) -> Failure:
        """A failure as the server gets it; what it does not get is logged here."""
        if self.tells(config):
            return failure
        _log.error("client %d failed: %s\n%s", failure.partition, failure.reason, failure.details)
        return replace(failure, details="")


def is_deployed(config: ExperimentConfig) -> bool:
    """Whether nodes are machines of their own."""
    return config.engine.name == "superlink"


def _partitions(given: Mapping[str, Any], node_id: int) -> tuple[int, ...]:
    if PARTITIONS_KEY in given:
        return tuple(int(item) for item in str(given[PARTITIONS_KEY]).split(","))
    if PARTITION_KEY in given:
        return (int(given[PARTITION_KEY]),)
    raise ConfigError(
        f"node {node_id} has no partition: start its SuperNode with --node-config 'partition-id=K', K from 0."
    )


def _own_sharding(given: Mapping[str, Any]) -> tuple[tuple[str, str | int], ...]:
    return tuple((name, given[key]) for name, key in SHARDING_KEYS.items() if key in given)


@lru_cache(maxsize=2)  # a process serves many messages
def _workload(config_toml: str, node: Node) -> Workload:
    return as_played(from_toml(config_toml), node)


def as_played(config: ExperimentConfig, node: Node) -> Workload:
    """An experiment with what a node decides for itself."""
    changes: dict[str, Any] = {f"client.sharding.{name}": value for name, value in node.sharding}
    if node.device:
        changes["engine.device"] = node.device
    if not sites.has_sites(config):
        return Workload(config.replace(**changes, **_own_root(config, node)))
    changes |= _own_site(config, node)
    here = frozenset(node.partitions) if sites.lies_at_nodes(config) else None
    return Workload(config.replace(**changes), here)


def _own_root(config: ExperimentConfig, node: Node) -> dict[str, Any]:
    """Where this node finds the data that the experiment deals out, if they are read from somewhere."""
    known = plugins.names_of(config.data.kind, config.data.name)
    if not node.data_root or not {"root", "path"} & {*known}:
        return {}
    own = rooted(config.data, node.data_root)
    return {f"data.{key}": value for key, value in own.items() if value != config.data.settings.get(key)}


def _own_site(config: ExperimentConfig, node: Node) -> dict[str, Any]:
    """The site's own folder and name.

    Raises:
        ConfigError: there is one folder for several sites.
    """
    if not sites.lies_at_nodes(config):
        return {}
    if node.data_root and len(node.partitions) > 1:
        raise ConfigError(
            f"a node with one {ROOT_KEY} serves the sites {list(node.partitions)}; start a SuperNode for each, with its own "
            f"{ROOT_KEY}."
        )
    num_clients = config.partition.num_clients
    names = list(config.partition.settings["names"]) or [""] * num_clients
    roots = [sites.root_of(config, site) for site in range(num_clients)]
    for site in node.partitions:
        if not 0 <= site < num_clients:
            raise ConfigError(
                f"a node serves site {site}, but there are {num_clients}, from 0 on; correct its partition-id, or "
                "partition.num_clients."
            )
        roots[site] = node.data_root or roots[site]
        names[site] = node.site or names[site] or f"site {site}"  # never its folder's name, which is the site's affair
    names = [name or f"site {site}" for site, name in enumerate(names)]
    return {"partition.roots": roots, "partition.names": names, "partition.test_root": ""}
