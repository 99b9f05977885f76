"""[privacy] in a run: requirements on the experiment, and the privacy account kept by the round loop.

`fedsign.privacy.rules` rejects, before the run, experiments that cannot be private.
"""

import tomllib
from collections.abc import Iterator
from math import ceil
from pathlib import Path

from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedsign.errors import ConfigError
from fedsign.federation.exchange import RoundHook, Traffic
from fedsign.privacy.accounting import Accountant
from fedsign.privacy.budget import NAME as LEDGER
from fedsign.privacy.budget import Budget
from fedsign.privacy.central import Central
from fedsign.privacy.local import Local
from fedsign.privacy.secret import MARK, NAME, run_of
from fedsign.privacy.section import PrivacyPart
from fedsign.storage.results import Record, RunFolder, read_json
from fedsign.workload import Workload
from strategies.base import Strategy


class Account(RoundHook):
    """The privacy account of a run, updated every round."""

    def __init__(self, privacy: Central | Local, accountant: Accountant, folder: RunFolder, *, round: int) -> None:
        """`round`: the last completed round."""
        self._privacy, self._accountant = privacy, accountant
        self._budget = Budget(folder.path, accountant, round=round)

    def begin(self, round: int) -> None:
        """Record the parameters that the mechanism has in this round, before they adapt."""
        self._round = round
        self._metrics: Record = dict(self._privacy.metrics()) if isinstance(self._privacy, Central) else {}

    def end(self, traffic: Traffic) -> Record:
        """Charge the round to the account; return the privacy fields of the record."""
        epsilon = self._budget.spend(self._round, self._privacy.released(traffic.sent), self._metrics)
        metrics: Record = {"epsilon": epsilon, **self._metrics}
        if isinstance(self._privacy, Local):
            metrics["epsilon_round"] = self._accountant.epsilon(1)
        return metrics

    def write(self, record: Record, *, durable: bool) -> Record:
        """Return the record without metrics computed from data that were not private."""
        return {key: value for key, value in record.items() if key not in self._privacy.withheld}


def prepare(workload: Workload, strategy: FlowerStrategy) -> None:
    """Set up private aggregation in the strategy (extension point `strategy_transform`).

    Raises:
        ConfigError: the factory of [privacy] returns another type, or its settings do not fit the cohort.
    """
    part = PrivacyPart.of(workload.config)
    rule = part.build()
    if rule is None:
        return
    if not isinstance(rule, Central | Local):
        raise ConfigError(
            f"privacy.name={part.name} gives a {type(rule).__name__}; expected a Central or a Local of fedsign.privacy."
        )
    if isinstance(rule, Central):
        rule.check(cohort_size=workload.config.server.cohort_size)
    if isinstance(strategy, Strategy):
        accountant_of(workload, strategy, rule)  # reports a missing package before the run
        strategy.aggregator = rule


def round_hook(workload: Workload, strategy: FlowerStrategy, folder: RunFolder, *, round: int) -> Account | None:
    """Return the account of a strategy with privacy (extension point `round_hook`)."""
    privacy = strategy.aggregator if isinstance(strategy, Strategy) else None
    if not isinstance(privacy, Central | Local):
        return None
    if isinstance(privacy, Central):
        privacy.open(folder.path, cohort_size=workload.config.server.cohort_size, expected=round > 0)
    return Account(privacy, accountant_of(workload, strategy, privacy), folder, round=round)


def verify(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield a key that is another run's, or that a run in process has lost (extension point `verify`)."""
    mark, run = folder / MARK, RunFolder(folder)
    if mark.exists() and read_json(mark).get("run", run_of(folder)) != run_of(folder):
        yield mark, f"{mark} is of another run; put back the one that was there, with its key."
    keys = [run.path / NAME, run.clients / NAME]
    if not (folder / LEDGER).exists() or any(key.exists() for key in keys):
        return
    config = tomllib.loads(run.config_toml)
    if config["engine"]["name"] == "in_process":
        key = keys[config["privacy"]["name"] == "local"]
        yield key, f"{key} is missing, with which noise was drawn; put it back, or start a new run."


def accountant_of(workload: Workload, strategy: FlowerStrategy, privacy: Central | Local) -> Accountant:
    """Return the accountant that computes epsilon. Amplification by sampling counts only if our sampling is secret.

    Raises:
        ConfigError: `dp-accounting` is not installed.
    """
    config = workload.config
    is_secret = isinstance(privacy, Central) and privacy.sampling == "secret"
    # an own `sample` may not be uniform, which the amplification assumes
    counts = is_secret and getattr(type(strategy), "sample", None) is Strategy.sample
    num_clients, server = config.partition.num_clients, config.server
    num_sampled = min(ceil(server.cohort_size * (1 + server.over_sampling)), num_clients)  # upper bound on replies
    return Accountant(
        noise_multiplier=privacy.noise_multiplier,
        delta=privacy.delta,
        num_clients=num_clients,
        # the whole population: a sampling rate of 1, without amplification
        sample_size=num_sampled if counts else num_clients,
    )
