"""Apply a parameterization to a model: reinitialize it, sparsify it, and attach its multipliers.

This adds no parameters, buffers, or names to the state_dict.  Multipliers are hooks, and a multiplier of 1 adds none,
so at the base width and density the model is bitwise the standard one.  The weights alone are therefore not the
complete model: code that uses them elsewhere must apply the multipliers, too.

The optimizer gets parameter groups with the plan's learning rates and weight decay.  A group's `masks` mark the present
weights, for optimizers that keep state for those alone.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedsign.config import ExperimentConfig
from fedsign.errors import ConfigError
from fedsign.models.transform import Packing, Transform, attach, transforms_of
from fedsign.parameterization.masks import Mask, hold, mask_of
from fedsign.parameterization.multipliers import folded, multiply
from fedsign.parameterization.packed import Packed, PackedAdamW, PackedSGD
from fedsign.parameterization.packing import rows_of
from fedsign.parameterization.plan import Plan, TensorPlan, plan_of
from fedsign.parameterization.products import Products, multiply_sparsely
from fedsign.parameterization.schemes import Scheme
from fedsign.parameterization.section import MaskDraw, ParameterizationPart, SparseKeys, SparsityPart
from fedsign.parameterization.sparsity.base import Changing, Masked, MaskRule
from fedsign.sections import OptimizerPart
from fedsign.traits import OptimizerTraits

_PRODUCTS = Products()
PartT = TypeVar("PartT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameterized(Transform):
    """A model's parameterization: its plan, its masks, the rule that changes them, and how it computes products."""

    plan: Plan
    masks: dict[str, Mask]
    rule: MaskRule | None = None
    products: Products = _PRODUCTS

    def packing(self, model: nn.Module) -> Packing:
        """Rows of present weights, or whole tensors under a mask rule, since the other side does not know the masks."""
        return Packing() if self.rule is not None else rows_of(model, self.masks)

    @torch.no_grad()
    def place(self, model: nn.Module, shared: dict[str, Tensor]) -> None:
        """Move the masks to the parameters' device, and zero absent weights that were loaded."""
        for name, mask in self.masks.items():
            parameter = model.get_parameter(name)
            # not become(): the same weights are present, so cached indices stay valid
            mask.is_present = mask.is_present.to(parameter.device)
            parameter.mul_(mask.is_present)

    def prepare_training(self, model: nn.Module) -> None:
        """Let sparse layers skip absent weights where that is faster."""
        multiply_sparsely(model, self.masks, self.products)

    def optimizer(self, part: OptimizerPart, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Build the optimizer with the plan's parameter groups; with a mask rule, its steps also change masks.

        Raises:
            ConfigError: the optimizer does not support groups, or the scheme has no learning rates for it.
        """
        groups, masks, rule = self._groups(model), self.masks, self.rule
        optimizer: torch.optim.Optimizer
        if OptimizerTraits.of(part.name).takes_model:
            optimizer = part.build(model, lr, weight_decay)
            # the factory took the module, so its single group is split afterwards, with its settings
            (whole,) = optimizer.param_groups
            optimizer.param_groups[:] = [{**whole, **group} for group in groups]
        else:
            optimizer = part.build(groups, lr, weight_decay)
        _set_rates(optimizer, part, self.plan.scheme, lr, weight_decay)
        if rule is not None:
            if not isinstance(optimizer, Packed):
                raise ConfigError(
                    f"client.optimizer.name={part.name} was given with sparsity.name={rule.name}, "
                    "but its state would not "
                    "follow masks that change; use packed_sgd or packed_adamw."
                )
            plans = self.plan.tensors
            tensors = [Masked(model.get_parameter(name), mask, plans[name].density) for name, mask in masks.items()]
            optimizer.take_step = Changing(rule, tensors).step
        return optimizer

    def plain(self, model: nn.Module) -> nn.Module:
        """A copy with the multipliers folded into the weights."""
        return folded(model, self.plan)

    def _groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Group parameters with equal rates and decay, in the order of the model."""
        groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
        for name, tensor in self.plan.tensors.items():
            # exact floats: equal rates come from the same formula
            key = (tensor.adam_rate, tensor.sgd_rate, tensor.decays)
            group = groups.setdefault(key, {"params": [], "masks": [], "plan": tensor})
            group["params"].append(model.get_parameter(name))
            group["masks"].append(self.masks.get(name))
        return list(groups.values())


def parameterized(model: nn.Module) -> Parameterized | None:
    """A model's parameterization, if it has one."""
    return next((each for each in transforms_of(model) if isinstance(each, Parameterized)), None)


def parameterize(
    model: nn.Module,
    scheme: Scheme,
    *,
    seed: int,
    rule: MaskRule | None = None,
    draw: MaskDraw = "bernoulli",
    products: Products = _PRODUCTS,
) -> None:
    """Reinitialize a model from torch's global generator, draw its masks, and attach its multipliers.

    A `rule` sets the initial density of the masks; initialization and rates follow the scheme's density.

    Raises:
        ConfigError: the model's roles are unknown, or the rule cannot start at this density.
    """
    plan = plan_of(model, scheme)
    # whole tensors, masked below: one seed draws the same numbers at every density, up to their scale
    _draw(model, plan)
    masks = {}
    for name, tensor in plan.tensors.items():
        if tensor.density < 1:
            density = rule.first_density(tensor.density) if rule else tensor.density
            masks[name] = mask_of(seed, name, model.get_parameter(name).shape, density, draw=draw)
    hold(model, masks)
    multiply(model, plan)
    attach(model, Parameterized(plan=plan, masks=masks, rule=rule, products=products))


def parameterize_as(config: ExperimentConfig, model: nn.Module) -> None:
    """Apply the configuration's [parameterization] and [sparsity] to a new model; `none` changes nothing.

    Raises:
        ConfigError: they do not fit the model.
    """
    sparsity, engine = SparsityPart.of(config), config.engine
    scheme, rule = _built(ParameterizationPart.of(config), Scheme), _built(sparsity, MaskRule)
    if scheme is not None:
        kind = SparseKeys.of(config).sparse_products
        products = Products(kind=kind, precision=engine.precision, compile=engine.compile)
        parameterize(model, scheme, seed=config.seed, rule=rule, draw=sparsity.draw, products=products)


def _built(part: ParameterizationPart | SparsityPart, kind: type[PartT]) -> PartT | None:
    built = part.build()
    if built is None or isinstance(built, kind):
        return built
    raise ConfigError(
        f"{part.kind}.name={part.name} gives a {type(built).__name__}; expected a {kind.__name__} of {kind.__module__}."
    )


@torch.no_grad()
def _draw(model: nn.Module, plan: Plan) -> None:
    for name, tensor in plan.tensors.items():
        parameter = model.get_parameter(name)
        if tensor.init_std is not None:
            nn.init.normal_(parameter, std=tensor.init_std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def _set_rates(
    optimizer: torch.optim.Optimizer, part: OptimizerPart, scheme: Scheme, lr: float, weight_decay: float
) -> None:
    is_sgd = isinstance(optimizer, torch.optim.SGD | PackedSGD)
    if not (is_sgd or isinstance(optimizer, torch.optim.Adam | PackedAdamW) or scheme.name == "sp"):
        raise ConfigError(
            f"client.optimizer.name={part.name} was given with parameterization.name={scheme.name}, "
            "which has rules for "
            "SGD, Adam and AdamW only; use sgd, adam, adamw, packed_sgd or packed_adamw, or parameterization.name=sp."
        )
    for group in optimizer.param_groups:
        tensor: TensorPlan = group["plan"]
        rate = tensor.sgd_rate if is_sgd else tensor.adam_rate
        group["lr"] = lr * rate
        if not tensor.decays:
            group["weight_decay"] = 0.0
        elif scheme.decay == "base":
            # torch multiplies it by the group's lr, which contains the rate
            group["weight_decay"] = weight_decay / rate
            # torch's AdamW is a subclass of Adam, so the flag tells them apart
            if weight_decay and isinstance(optimizer, torch.optim.Adam) and not group["decoupled_weight_decay"]:
                raise ConfigError(
                    f"client.optimizer.name={part.name} was given with parameterization.decay=base, "
                    "but its weight decay "
                    "is a part of the gradient that Adam rescales; use adamw, or parameterization.decay=rate."
                )
