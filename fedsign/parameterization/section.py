"""The configuration tables [parameterization] and [sparsity], and the [engine] key for sparse products."""

from typing import Literal

from fedsign.rules import Rule
from fedsign.sections import Part, Table
from fedsign.traits import OptimizerTraits

MaskDraw = Literal["bernoulli", "exact"]


class ParameterizationPart(Part):
    """How initialization and learning rates depend on width and density (`fedsign.parameterization`)."""

    kind = "parameterization"
    rules = (
        Rule(
            lambda config: config.parameterization.is_chosen and config.model.settings.get("weights"),
            "parameterization.name={parameterization.name} was given with model.weights, which would be drawn anew",
            "use parameterization.name=none",
        ),
        Rule(
            lambda config: (
                config.parameterization.is_chosen and not OptimizerTraits.of(config.client.optimizer.name).takes_rates
            ),
            "parameterization.name={parameterization.name} was given with "
            "client.optimizer.name={client.optimizer.name}, "
            "which divides the model in its own way",
            "use sgd, adam, adamw, packed_sgd, packed_adamw or lisa",
        ),
    )
    name: str = "none"


class SparsityPart(Part):
    """How the masks of a sparse model are drawn, and how they change while one client trains in one round."""

    kind = "sparsity"
    rules = (
        Rule(
            lambda config: config.sparsity.is_chosen and not config.parameterization.is_chosen,
            "sparsity.name={sparsity.name} was given with parameterization.name=none, which has no masks to change",
            "name a parameterization (sp is the usual one) with a density, or use sparsity.name=static",
        ),
        Rule(
            lambda config: config.sparsity.draw != SparsityPart().draw and not config.parameterization.is_chosen,
            "sparsity.draw={sparsity.draw} was given with parameterization.name=none, which draws no masks",
            "name a parameterization (sp is the usual one) with a density, or leave sparsity.draw out",
        ),
    )
    name: str = "static"
    draw: MaskDraw = "bernoulli"  # or a fixed number of weights, see `fedsign.parameterization.masks`


class SparseKeys(Table):
    """Keys in [engine]."""

    sparse_products: Literal["auto", "dense", "csr"] = "auto"  # in training; auto: csr where it is faster
