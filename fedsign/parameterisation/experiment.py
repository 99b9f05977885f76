"""The parameterisation of an experiment: what its configuration says, done to its model.

What would undo it is refused: weights that were loaded and would be drawn anew, optimisers that divide the model in their own way.
"""

import torch
from torch import nn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.optim.base import takes_groups
from fedsign.parameterisation.apply import mask_again, parameterise
from fedsign.parameterisation.schemes import Scheme


def parameterise_as(config: ExperimentConfig, model: nn.Module) -> None:
    """Make a new model what [parameterisation] says, by torch's global generator; nothing for `none`.

    Raises:
        ConfigError: it cannot be, or another part would undo it.
    """
    scheme: Scheme | None = config.parameterisation.build()
    if scheme is None:
        return
    if not isinstance(scheme, Scheme):
        raise ConfigError(
            f"parameterisation.name={config.parameterisation.name} gives a {type(scheme).__name__}; expected is a Scheme of "
            "fedsign.parameterisation.schemes."
        )
    _check(config, scheme)
    parameterise(model, scheme, seed=config.seed)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on a device, its masks too; weights that it does not have are 0, though it was loaded."""
    model = model.to(device)
    mask_again(model)
    return model


def _check(config: ExperimentConfig, scheme: Scheme) -> None:
    given = f"parameterisation.name={scheme.name} was given with"
    if config.model.settings.get("weights"):
        raise ConfigError(f"{given} model.weights, which would be drawn anew; use parameterisation.name=none.")
    name = config.client.optimizer.name
    if not takes_groups(name):
        raise ConfigError(
            f"{given} client.optimizer.name={name}, which divides the model in its own way; use sgd, adam, adamw, packed_sgd, "
            "packed_adamw or lisa."
        )
