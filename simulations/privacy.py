"""[privacy] in a run: what it asks of an experiment, and the account that the round loop keeps of it.

What cannot be private is refused before the run, in one sentence: a strategy that is given the replies as they are, weights by
samples, buffers (a variance with noise on it may be below zero), figures of the clients' own updates.
"""

from math import ceil

from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedsign.errors import ConfigError
from fedsign.exchange import RoundHook, Traffic
from fedsign.privacy.accounting import Accountant
from fedsign.privacy.budget import Budget
from fedsign.privacy.central import Central
from fedsign.privacy.local import Local, LocalPrivacy
from fedsign.privacy.mechanism import CentralPrivacy
from fedsign.privacy.section import PrivacyPart
from fedsign.records import Role
from fedsign.results import Line, RunFolder
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
    privacy = privacy_for(workload, strategy)
    if privacy is not None and isinstance(strategy, Strategy):
        accountant_of(workload, strategy, privacy)  # so that a missing package is known before the run
        strategy.aggregator = privacy


def privacy_for(workload: Workload, strategy: FlowerStrategy) -> CentralPrivacy | LocalPrivacy | None:
    """The server's half of [privacy]; None for `none`.

    Raises:
        ConfigError: the experiment cannot be made private so.
    """
    part, config = PrivacyPart.of(workload.config), workload.config
    rule = part.build()
    if rule is None:
        return None
    if not isinstance(rule, Central | Local):
        raise ConfigError(
            f"privacy.name={part.name} gives a {type(rule).__name__}; expected is a Central or a Local of fedsign.privacy."
        )
    _check_strategy(workload, strategy)
    if Role.BUFFER in workload.roles.values():
        raise ConfigError(
            f"privacy.name={part.name} was given, but model.name={config.model.name} has buffers, such as BatchNorm's statistics, "
            "which noise would spoil; use a model without BatchNorm."
        )
    if rule.delta >= 1 / config.partition.num_clients:
        raise ConfigError(
            f"privacy.delta={rule.delta:g} was given for {config.partition.num_clients} clients; expected is less than 1 by their "
            "number, or to publish one of them at random would be private: lower privacy.delta."
        )
    if isinstance(rule, Local):
        if workload.is_evaluated_at_clients:
            raise ConfigError(
                f"privacy.name={part.name} was given, but the clients evaluate, and would send figures without noise to a server that "
                "is not trusted; use server.evaluation=server, or privacy.name=central."
            )
        return LocalPrivacy(rule)
    if config.get("results.signs", False):
        raise ConfigError(
            f"results.signs=true was given with privacy.name={part.name}, but signs are counted on updates without noise; set "
            "results.signs=false."
        )
    return CentralPrivacy(rule, cohort_size=config.server.cohort_size)


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


def _check_strategy(workload: Workload, strategy: FlowerStrategy) -> None:
    part, name = PrivacyPart.of(workload.config), workload.config.strategy.name
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"privacy.name={part.name} was given, but strategy {name} is Flower's and takes the replies as they are; take a "
            "strategy of FedSign's, or one of Flower's flower_dp_... with privacy.name=none."
        )
    kind = type(strategy)
    for method in ("aggregate", "aggregate_train"):
        if getattr(kind, method) is not getattr(Strategy, method):
            raise ConfigError(
                f"privacy.name={part.name} was given, but strategy {name} has a method {method} of its own, which takes the "
                "replies as they are; let it answer by `move` instead."
            )
    if kind.weight is not Strategy.weight or strategy.weighting != "uniform" or strategy.weights:
        raise ConfigError(
            f"privacy.name={part.name} was given, but strategy {name} weights its replies, so that one client could count for more "
            "than the noise covers; use strategy.weighting=uniform, without strategy.weights."
        )
