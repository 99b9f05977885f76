"""`fedsign deploy status`: the SuperLink, its runs, and each site's state and recent events.

Combines federation.toml, the SuperLink's view of its nodes, and the records of the runs.
"""

import datetime as dt
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.proto.node_pb2 import NodeInfo

from simulations.deployment.accounts import remarks
from simulations.deployment.federation import Federation, Site
from simulations.deployment.keys import ends_at, validity
from simulations.deployment.membership import answers, in_pem, nodes_of, process_of
from simulations.deployment.progress import RunProgress, runs_of
from simulations.deployment.refusals import refused

Row = dict[str, Any]


def status_of(federation: Federation) -> Row:
    """Return `superlink`, `is_up`, `certificate`, `remarks` on accounts, and the rows of `runs`, `sites`, `refused`."""
    process, runs = process_of(federation), [run for run in runs_of(federation) if not run.is_over]
    is_up = process is not None and answers(federation)
    # by key: Flower's list also holds unregistered nodes, perhaps of the same name
    nodes = {node.public_key: node for node in nodes_of(federation)} if is_up else {}
    if process is None:
        link = f"not running; start it with {federation.server / 'start.sh'}"
    else:
        since = f"{dt.datetime.fromtimestamp(process.create_time()):%Y-%m-%d %H:%M}"
        link = (
            f"process {process.pid} at {federation.local_address} since "
            f"{since}{'' if is_up else ', does not answer yet'}"
        )
    ends = None if federation.insecure else ends_at(federation.certificate)
    names = {site.partition: site.name for site in federation.active}
    return {
        "superlink": link,
        "is_up": is_up,
        "certificate": "none" if ends is None else validity(ends)[1],
        "remarks": [*remarks(federation)],
        "runs": [_run(run, names) for run in runs],
        "sites": [
            _site(site, nodes.get(in_pem(site.public_key)) if site.public_key else None, runs)
            for site in federation.sites
        ],
        "refused": [
            {"refused from": who, "count": count, "what": what}
            for (who, what), count in refused(federation).most_common()
        ],
    }


def _run(run: RunProgress, names: Mapping[int, str]) -> Row:
    """Describe a run's progress, and which sites it waits for."""
    waiting = [names.get(partition, str(partition)) for partition in run.waiting] if run.is_running else []
    # max: the clock may have been set back since
    phase = f"{run.what} for {max(time.time() - run.since, 0):.0f} s"
    if not run.is_running:
        phase = f"interrupted; resume with: {run.how_to_go_on}"
    return {
        "run": str(run.run.path),
        "round": f"{run.round}/{run.num_rounds}",
        "phase": phase,
        "waits for": ", ".join(waiting),
    }


def _site(site: Site, node: NodeInfo | None, runs: Sequence[RunProgress]) -> Row:
    """Describe a site, and its events in active runs."""
    events = [event for run in runs for event in run.run.records("members.jsonl") if event["site"] == site.name]
    # `in`, not startswith: failures of an evaluation begin with "in evaluation: "
    failures = [
        event for run in runs for event in run.run.records("failures.jsonl") if f"site {site.name}: " in event["reason"]
    ]
    counts = Counter(event["event"] for event in events)
    # the key exists once the site has answered a roll call; its remark may be empty
    remarks = [run.remarks[str(site.partition)] for run in runs if str(site.partition) in run.remarks]
    last = events[-1] if events else None
    return {
        "site": site.name,
        "partition": site.partition,
        "state": _state(site, node),
        "last seen": _last_seen(node),
        "versions": (remarks[-1] or "the server's") if remarks else "",
        "failures": len(failures),
        "late": counts["late"],
        "refused": counts["refused"],
        "last event": f"round {last['round']}: {last['event']}, {last['why']}" if last else "",
    }


def _state(site: Site, node: NodeInfo | None) -> str:
    if not site.is_active:
        return "revoked"
    if node is None:
        return "unknown"
    return "never seen" if node.status == "registered" else node.status


def _last_seen(node: NodeInfo | None) -> str | None:
    """Return the time of a node's last heartbeat, or when it left or was found to be gone."""
    if node is None or not node.last_activated_at:
        return None
    if node.status == "online":
        # the SuperLink stores when patience ends, not when the last heartbeat came
        at = dt.datetime.fromtimestamp(node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval, dt.UTC)
    else:
        at = dt.datetime.fromisoformat(node.last_deactivated_at or node.last_activated_at)
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"
