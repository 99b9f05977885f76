"""A model made what its plan says: drawn anew, thinned out, its passes multiplied.

No parameter, no buffer and no name in the state_dict is added: multipliers are hooks, and a multiplier of 1 is none, so that
at the base's width and density a model is the standard one, bit for bit.  The weights alone are therefore not the whole
model: who takes them elsewhere has to multiply as well.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.models.transform import Packing, Transform, attach, transforms_of
from fedsign.parameterisation.groups import grouped_optimizer
from fedsign.parameterisation.masks import Mask, hold, mask_of
from fedsign.parameterisation.multipliers import folded, multiply
from fedsign.parameterisation.packing import rows_of
from fedsign.parameterisation.plan import Plan, plan_of
from fedsign.parameterisation.products import Products, multiply_sparsely
from fedsign.parameterisation.schemes import Scheme
from fedsign.parameterisation.section import MaskDraw, ParameterisationPart, SparseKeys, SparsityPart
from fedsign.parameterisation.sparsity.base import MaskRule
from fedsign.sections import OptimizerPart

_PRODUCTS = Products()
PartT = TypeVar("PartT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameterised(Transform):
    """What a model was made: its plan, the masks of its sparse tensors, how they change, if they do, and how it multiplies."""

    plan: Plan
    masks: dict[str, Mask]
    rule: MaskRule | None = None
    products: Products = _PRODUCTS

    def packing(self, model: nn.Module) -> Packing:
        """Rows of weights.  Where masks change the other side does not know them, and tensors travel whole."""
        return Packing() if self.rule is not None else rows_of(model, self.masks)

    @torch.no_grad()
    def place(self, model: nn.Module, shared: dict[str, Tensor]) -> None:
        """Move the masks to the parameters, and put absent weights to 0, though they were loaded."""
        for name, mask in self.masks.items():
            parameter = model.get_parameter(name)
            mask.is_there = mask.is_there.to(parameter.device)
            parameter.mul_(mask.is_there)

    def prepare_training(self, model: nn.Module) -> None:
        """Let sparse layers leave out absent weights where that pays."""
        multiply_sparsely(model, self.masks, self.products)

    def optimizer(self, part: OptimizerPart, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """One whose groups have the plan's rates."""
        return grouped_optimizer(part, model, lr, weight_decay, plan=self.plan, masks=self.masks, rule=self.rule)

    def plain(self, model: nn.Module) -> nn.Module:
        """A copy with the multipliers in its weights."""
        return folded(model, self.plan)


def parameterised(model: nn.Module) -> Parameterised | None:
    """What a model was made by `parameterise`, if it was."""
    return next((each for each in transforms_of(model) if isinstance(each, Parameterised)), None)


def parameterise(
    model: nn.Module,
    scheme: Scheme,
    *,
    seed: int,
    rule: MaskRule | None = None,
    draw: MaskDraw = "bernoulli",
    products: Products = _PRODUCTS,
) -> None:
    """Draw a model's parameters anew by torch's global generator, draw its masks, and multiply its passes.

    Under a `rule` masks have the density that it starts with; start and rates are those of the density that the scheme says.

    Raises:
        ConfigError: the model's roles are not known, or the rule cannot start with this density.
    """
    plan = plan_of(model, scheme)
    _draw(model, plan)
    masks = {
        name: mask_of(
            seed, name, tensor.shape, rule.first_density(tensor.density) if rule else tensor.density, draw=draw
        )
        for name, tensor in plan.tensors.items()
        if tensor.density < 1
    }
    hold(model, masks)
    multiply(model, plan)
    attach(model, Parameterised(plan=plan, masks=masks, rule=rule, products=products))


def parameterise_as(config: ExperimentConfig, model: nn.Module) -> None:
    """Make a new model what [parameterisation] says, by torch's global generator; nothing for `none`.

    Raises:
        ConfigError: it cannot be.
    """
    sparsity, engine = SparsityPart.of(config), config.engine
    scheme, rule = _built(ParameterisationPart.of(config), Scheme), _built(sparsity, MaskRule)
    if scheme is not None:
        products = Products(
            kind=SparseKeys.of(config).sparse_products, precision=engine.precision, compile=engine.compile
        )
        parameterise(model, scheme, seed=config.seed, rule=rule, draw=sparsity.draw, products=products)


def _built(part: ParameterisationPart | SparsityPart, kind: type[PartT]) -> PartT | None:
    made = part.build()
    if made is None or isinstance(made, kind):
        return made
    raise ConfigError(
        f"{part.kind}.name={part.name} gives a {type(made).__name__}; expected is a {kind.__name__} of {kind.__module__}."
    )


@torch.no_grad()
def _draw(model: nn.Module, plan: Plan) -> None:
    for name, tensor in plan.tensors.items():
        parameter = model.get_parameter(name)
        if tensor.init_std is not None:
            nn.init.normal_(parameter, std=tensor.init_std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
