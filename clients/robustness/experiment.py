"""What attackers and faults add to an experiment: conduct at the clients, and a figure in a round's record."""

from pathlib import Path

from clients.conduct import Conduct
from clients.robustness.attack import Attack
from clients.robustness.faults import Faults
from fedsign.workload import Workload


def conducts_of(workload: Workload, *, in_process: bool, folder: Path) -> list[Conduct]:
    """At the extension point `client_middleware`: what malicious clients send, and then what arrives of anybody's."""
    config = workload.config
    found: list[Conduct] = []
    if config.attack.name != "none":
        found.append(Attack(config.attack, seed=config.seed, num_clients=config.partition.num_clients))
    if config.faults.any:
        found.append(
            Faults(config.faults, seed=config.seed, timeout_s=config.server.round_timeout_s, waits=not in_process)
        )
    return found
