"""The parameterisation of an experiment: what its configuration says, done to its model.

What would undo it is refused: weights that were loaded and would be drawn anew, optimisers that divide the model in their own way.
"""

from torch import nn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.optim.base import takes_groups
from fedsign.parameterisation.apply import parameterise
from fedsign.parameterisation.products import Products
from fedsign.parameterisation.schemes import Scheme
from fedsign.parameterisation.section import ParameterisationPart, SparseKeys, SparsityPart
from fedsign.parameterisation.sparsity.base import MaskRule


def parameterise_as(config: ExperimentConfig, model: nn.Module) -> None:
    """Make a new model what [parameterisation] says, by torch's global generator; nothing for `none`.

    Raises:
        ConfigError: it cannot be, or another part would undo it.
    """
    part = ParameterisationPart.of(config)
    scheme: Scheme | None = part.build()
    if scheme is not None and not isinstance(scheme, Scheme):
        raise ConfigError(
            f"parameterisation.name={part.name} gives a {type(scheme).__name__}; expected is a Scheme of "
            "fedsign.parameterisation.schemes."
        )
    rule = _rule_of(config, scheme)
    if scheme is None:
        _refuse_a_draw(config)
        return
    _check(config, scheme)
    engine = config.engine
    products = Products(kind=SparseKeys.of(config).sparse_products, precision=engine.precision, compile=engine.compile)
    parameterise(model, scheme, seed=config.seed, rule=rule, draw=SparsityPart.of(config).draw, products=products)


def _rule_of(config: ExperimentConfig, scheme: Scheme | None) -> MaskRule | None:
    """How masks change; None where they do not.  Tensors of density 1 have none."""
    part = SparsityPart.of(config)
    rule: MaskRule | None = part.build()
    if rule is None:
        return None
    if not isinstance(rule, MaskRule):
        raise ConfigError(
            f"sparsity.name={part.name} gives a {type(rule).__name__}; expected is a MaskRule of "
            "fedsign.parameterisation.sparsity.base."
        )
    if scheme is None:
        raise ConfigError(
            f"sparsity.name={rule.name} was given with parameterisation.name=none, which has no masks to change; name a "
            "parameterisation (sp is the usual one) with a density, or use sparsity.name=static."
        )
    return rule


def _refuse_a_draw(config: ExperimentConfig) -> None:
    draw = SparsityPart.of(config).draw
    if draw != SparsityPart().draw:
        raise ConfigError(
            f"sparsity.draw={draw} was given with parameterisation.name=none, which draws no masks; name a "
            "parameterisation (sp is the usual one) with a density, or leave sparsity.draw out."
        )


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
