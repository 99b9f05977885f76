"""What attackers and faults add to an experiment: conduct at the clients, and a figure in a round's record."""

from pathlib import Path

from clients.conduct import Conduct
from clients.robustness.attack import attack_of
from clients.robustness.faults import faults_of
from clients.robustness.section import AttackPart
from fedsign.workload import Workload


def conducts_of(workload: Workload, *, in_process: bool, folder: Path) -> list[Conduct]:
    """At the extension point `client_middleware`: what malicious clients send, and then what arrives of anybody's."""
    config = workload.config
    attack = [attack_of(config)] if AttackPart.of(config).name != "none" else []
    faults = faults_of(config, waits=not in_process)
    return [*attack, *([] if faults is None else [faults])]
