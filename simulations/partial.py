"""LoRA in a run: its aggregation in the strategy, and the aggregation error in the record of each round."""

from functools import partial

from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedsign.federation.exchange import RoundHook, Traffic
from fedsign.partial.adapters import AdapterMean, LoraSettings, adapters_of
from fedsign.storage.results import Record, RunFolder
from fedsign.workload import Workload
from strategies.base import Strategy


class AggregationError(RoundHook):
    """Adds the aggregation error to a round's record."""

    def __init__(self, mean: AdapterMean) -> None:
        self._mean = mean

    def end(self, traffic: Traffic) -> Record:
        """The error of the round; null if all products are 0."""
        return {"aggregation_error": self._mean.error}


def prepare(workload: Workload, strategy: FlowerStrategy) -> None:
    """Let a strategy of FedSign's aggregate adapters (extension point `strategy_transform`)."""
    settings = LoraSettings.of(workload)
    if settings is not None and isinstance(strategy, Strategy) and not strategy.own_aggregation:
        config = workload.config
        strategy.aggregator = AdapterMean(
            settings,
            partial(adapters_of, workload),
            seed=config.seed,
            in_full=config.client.low_precision == "stochastic",
        )


def round_hook(
    workload: Workload, strategy: FlowerStrategy, folder: RunFolder, *, round: int
) -> AggregationError | None:
    """The extension point `round_hook`; None if something else aggregates, such as central privacy."""
    mean = strategy.aggregator if isinstance(strategy, Strategy) else None
    return AggregationError(mean) if isinstance(mean, AdapterMean) else None
