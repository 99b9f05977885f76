"""Extension points of attacks and faults: client middleware, and a metric in each round's record."""

from pathlib import Path

from clients.middleware import ClientMiddleware
from clients.robustness.attack import Attack, malicious
from clients.robustness.faults import Faults
from clients.robustness.section import AttackPart, FaultsSection
from fedsign.federation.exchange import RoundHook, Traffic
from fedsign.storage.results import Record, RunFolder
from fedsign.workload import Workload


def middleware_of(workload: Workload, *, in_process: bool, folder: Path) -> list[ClientMiddleware]:
    """The extension point `client_middleware`: attacks first, then faults, which may also hit attackers."""
    config = workload.config
    attack, faults = AttackPart.of(config), FaultsSection.of(config)
    middleware: list[ClientMiddleware] = []
    if attack.is_chosen:
        middleware.append(Attack(attack, seed=config.seed, num_clients=config.partition.num_clients))
    if faults.any:
        middleware.append(
            Faults(faults, seed=config.seed, timeout_s=config.server.round_timeout_s, waits=not in_process)
        )
    return middleware


class AttackHook(RoundHook):
    """Records the number of malicious clients in each cohort."""

    def __init__(self, malicious: frozenset[int]) -> None:
        self._malicious = malicious

    def end(self, traffic: Traffic) -> Record:
        """The number of malicious clients that were asked."""
        return {"malicious": len(self._malicious.intersection(traffic.sent))}


def round_hook(workload: Workload, strategy: object, folder: RunFolder, *, round: int) -> AttackHook | None:
    """The extension point `round_hook`; active with an attack."""
    config = workload.config
    attack = AttackPart.of(config)
    if not attack.is_chosen:
        return None
    return AttackHook(malicious(attack, seed=config.seed, num_clients=config.partition.num_clients))
