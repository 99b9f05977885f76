"""Clients that train a part of the model at a time: what such an experiment cannot do with it is said before the run.

Refused are strategies that need the same tensors from every client, and differential privacy: its noise covers every
coordinate of the model, whoever trained it, and for a mean over few of the clients it would be too little.
"""

from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fedsign.errors import ConfigError
from fedsign.optim.base import trains_part
from fedsign.workload import Workload
from strategies.base import Strategy


def check_parts(workload: Workload, strategy: FlowerStrategy) -> None:
    """Raise ConfigError where the strategy will get parts, and cannot do with them."""
    config = workload.config
    if not trains_part(config.client.optimizer.name):
        return
    given = f"client.optimizer.name={config.client.optimizer.name} trains a part of the model at a time, but"
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"{given} strategy {config.strategy.name} is Flower's and needs the same tensors from every client; take one of "
            "FedSign's, such as strategy.name=fedavg, or an optimiser that trains all, such as adamw."
        )
    if not strategy.takes_parts:
        raise ConfigError(
            f"{given} strategy {config.strategy.name} needs to know how far every parameter went; take another strategy, or an "
            "optimiser that trains all, such as client.optimizer.name=sgd."
        )
    private = config.get("privacy.name", "none")
    if private != "none":
        raise ConfigError(
            f"{given} privacy.name={private} covers all of it with noise; use privacy.name=none, or an optimiser that "
            "trains all, such as adamw."
        )
