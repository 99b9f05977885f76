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
from fedsign.privacy.local import Local, LocalPrivacy
from fedsign.privacy.mechanism import CentralPrivacy
from fedsign.privacy.section import PrivacyPart
from fedsign.storage.results import Line, RunFolder
from fedsign.workload import Workload
from strategies.base import Strategy

# What a round's line leaves out: figures of unclipped updates, and losses that clients with local privacy do not send.
_LEFT_OUT = {CentralPrivacy: ("train_loss", "update_norm", "client_drift"), LocalPrivacy: ("train_loss",)}


class Account(RoundHook):
    """What a run's privacy costs, round after round."""

    def __init__(
        self, privacy: CentralPrivacy | LocalPrivacy, accountant: Accountant, folder: RunFolder, *, round: int
    ) -> None:
        """`round`: the last one that was played."""
        if isinstance(privacy, CentralPrivacy):
            privacy.open(folder.path, expected=round > 0)
        self._privacy, self._accountant = privacy, accountant
        self._budget = Budget(folder.path, accountant, round=round)
        self._round = round
        self._figures: Line = {}

    def begin(self, round: int) -> None:
        """What the rule is for this round."""
        self._round = round
        self._figures = dict(self._privacy.rule.figures()) if isinstance(self._privacy, CentralPrivacy) else {}

    def end(self, traffic: Traffic) -> Line:
        """Spend; what the record says of privacy."""
        epsilon = self._budget.spend(self._round, self._privacy.released(traffic.sent), self._figures)
        figures: Line = {"epsilon": epsilon, **self._figures}
        if isinstance(self._privacy, LocalPrivacy):
            figures["epsilon_round"] = self._accountant.epsilon(1)
        return figures

    def write(self, record: Line, *, durable: bool) -> Line:
        """The record without figures of what was not private when they were computed."""
        return {key: value for key, value in record.items() if key not in _LEFT_OUT[type(self._privacy)]}


def prepare(workload: Workload, strategy: FlowerStrategy) -> None:
    """At the extension point `strategy_transform`: the strategy gathers with the privacy that the experiment asks for."""
    privacy = privacy_for(workload)
    if privacy is not None and isinstance(strategy, Strategy):
        accountant_of(workload, strategy, privacy)  # so that a missing package is known before the run
        strategy.aggregator = privacy


def privacy_for(workload: Workload) -> CentralPrivacy | LocalPrivacy | None:
    """The server's half of [privacy]; None for `none`.

    Raises:
        ConfigError: its factory gives something else.
    """
    part = PrivacyPart.of(workload.config)
    rule = part.build()
    if rule is None:
        return None
    if not isinstance(rule, Central | Local):
        raise ConfigError(
            f"privacy.name={part.name} gives a {type(rule).__name__}; expected is a Central or a Local of fedsign.privacy."
        )
    if isinstance(rule, Local):
        return LocalPrivacy(rule)
    return CentralPrivacy(rule, cohort_size=workload.config.server.cohort_size)


def round_hook(workload: Workload, strategy: FlowerStrategy, folder: RunFolder, *, round: int) -> Account | None:
    """At the extension point `round_hook`: the account of a strategy with privacy."""
    privacy = strategy.aggregator if isinstance(strategy, Strategy) else None
    if not isinstance(privacy, CentralPrivacy | LocalPrivacy):
        return None
    return Account(privacy, accountant_of(workload, strategy, privacy), folder, round=round)


def accountant_of(workload: Workload, strategy: FlowerStrategy, privacy: CentralPrivacy | LocalPrivacy) -> Accountant:
    """Who computes epsilon; sampling counts only where it is ours and secret.

    Raises:
        ConfigError: `dp-accounting` is not installed.
    """
    config = workload.config
    is_secret = isinstance(privacy, CentralPrivacy) and privacy.rule.sampling == "secret"
    counts = is_secret and getattr(type(strategy), "sample", None) is Strategy.sample
    num_clients, server = config.partition.num_clients, config.server
    num_asked = min(ceil(server.cohort_size * (1 + server.over_sampling)), num_clients)  # whose replies may count
    return Accountant(
        noise_multiplier=privacy.rule.noise_multiplier,
        delta=privacy.rule.delta,
        num_clients=num_clients,
        sample_size=num_asked if counts else num_clients,
    )
