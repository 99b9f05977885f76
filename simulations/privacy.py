"""[privacy] in a run: what it asks of an experiment, and the account that the round loop keeps of it.

What cannot be private is refused before the run: `fedsign.privacy.rules`.
"""

from math import ceil

from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedsign.errors import ConfigError
from fedsign.federation.exchange import RoundHook, Traffic
from fedsign.privacy.accounting import Accountant
from fedsign.privacy.budget import Budget
from fedsign.privacy.central import Central
from fedsign.privacy.local import Local
from fedsign.privacy.section import PrivacyPart
from fedsign.storage.results import Line, RunFolder
from fedsign.workload import Workload
from strategies.base import Strategy


class Account(RoundHook):
    """What a run's privacy costs, round after round."""

    def __init__(self, privacy: Central | Local, accountant: Accountant, folder: RunFolder, *, round: int) -> None:
        """`round`: the last one that was played."""
        self._privacy, self._accountant = privacy, accountant
        self._budget = Budget(folder.path, accountant, round=round)

    def begin(self, round: int) -> None:
        """What the rule is for this round."""
        self._round = round
        self._figures: Line = dict(self._privacy.figures()) if isinstance(self._privacy, Central) else {}

    def end(self, traffic: Traffic) -> Line:
        """Spend; what the record says of privacy."""
        epsilon = self._budget.spend(self._round, self._privacy.released(traffic.sent), self._figures)
        figures: Line = {"epsilon": epsilon, **self._figures}
        if isinstance(self._privacy, Local):
            figures["epsilon_round"] = self._accountant.epsilon(1)
        return figures

    def write(self, record: Line, *, durable: bool) -> Line:
        """The record without figures of what was not private when they were computed."""
        return {key: value for key, value in record.items() if key not in self._privacy.withheld}


def prepare(workload: Workload, strategy: FlowerStrategy) -> None:
    """At the extension point `strategy_transform`: the strategy gathers with the privacy that the experiment asks for.

    Raises:
        ConfigError: the factory of [privacy] gives something else, or its settings do not suit the cohort.
    """
    part = PrivacyPart.of(workload.config)
    rule = part.build()
    if rule is None:
        return
    if not isinstance(rule, Central | Local):
        raise ConfigError(
            f"privacy.name={part.name} gives a {type(rule).__name__}; expected is a Central or a Local of "
            "fedsign.privacy."
        )
    if isinstance(rule, Central):
        rule.check(cohort_size=workload.config.server.cohort_size)
    if isinstance(strategy, Strategy):
        accountant_of(workload, strategy, rule)  # so that a missing package is known before the run
        strategy.aggregator = rule


def round_hook(workload: Workload, strategy: FlowerStrategy, folder: RunFolder, *, round: int) -> Account | None:
    """At the extension point `round_hook`: the account of a strategy with privacy."""
    privacy = strategy.aggregator if isinstance(strategy, Strategy) else None
    if not isinstance(privacy, Central | Local):
        return None
    if isinstance(privacy, Central):
        privacy.open(folder.path, cohort_size=workload.config.server.cohort_size, expected=round > 0)
    return Account(privacy, accountant_of(workload, strategy, privacy), folder, round=round)


def accountant_of(workload: Workload, strategy: FlowerStrategy, privacy: Central | Local) -> Accountant:
    """Who computes epsilon; sampling counts only where it is ours and secret.

    Raises:
        ConfigError: `dp-accounting` is not installed.
    """
    config = workload.config
    is_secret = isinstance(privacy, Central) and privacy.sampling == "secret"
    counts = is_secret and getattr(type(strategy), "sample", None) is Strategy.sample
    num_clients, server = config.partition.num_clients, config.server
    num_asked = min(ceil(server.cohort_size * (1 + server.over_sampling)), num_clients)  # whose replies may count
    return Accountant(
        noise_multiplier=privacy.noise_multiplier,
        delta=privacy.delta,
        num_clients=num_clients,
        sample_size=num_asked if counts else num_clients,
    )
