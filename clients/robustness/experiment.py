"""What attackers and faults add to an experiment: conduct at the clients, and a figure in a round's record."""

from pathlib import Path

from clients.conduct import Conduct
from clients.robustness.attack import Attack
from clients.robustness.faults import Faults
from clients.robustness.section import AttackPart, FaultsSection
from fedsign.workload import Workload


def conducts_of(workload: Workload, *, in_process: bool, folder: Path) -> list[Conduct]:
    """At the extension point `client_middleware`: what malicious clients send, and then what arrives of anybody's."""
    config = workload.config
    attack, faults = AttackPart.of(config), FaultsSection.of(config)
    found: list[Conduct] = []
    if attack.name != "none":
        found.append(Attack(attack, seed=config.seed, num_clients=config.partition.num_clients))
    if faults.any:
        found.append(Faults(faults, seed=config.seed, timeout_s=config.server.round_timeout_s, waits=not in_process))
    return found
