"""The parameterisation of an experiment: what its configuration says, done to its model."""

from torch import nn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.parameterisation.apply import parameterise
from fedsign.parameterisation.products import Products
from fedsign.parameterisation.schemes import Scheme
from fedsign.parameterisation.section import ParameterisationPart, SparseKeys, SparsityPart
from fedsign.parameterisation.sparsity.base import MaskRule


def parameterise_as(config: ExperimentConfig, model: nn.Module) -> None:
    """Make a new model what [parameterisation] says, by torch's global generator; nothing for `none`.

    Raises:
        ConfigError: it cannot be.
    """
    part = ParameterisationPart.of(config)
    scheme: Scheme | None = part.build()
    if scheme is not None and not isinstance(scheme, Scheme):
        raise ConfigError(
            f"parameterisation.name={part.name} gives a {type(scheme).__name__}; expected is a Scheme of "
            "fedsign.parameterisation.schemes."
        )
    rule = _rule_of(config)
    if scheme is None:
        return
    engine = config.engine
    products = Products(kind=SparseKeys.of(config).sparse_products, precision=engine.precision, compile=engine.compile)
    parameterise(model, scheme, seed=config.seed, rule=rule, draw=SparsityPart.of(config).draw, products=products)


def _rule_of(config: ExperimentConfig) -> MaskRule | None:
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
    return rule
