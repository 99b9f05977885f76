"""An optimiser whose groups have the rates and the weight decay that a model's parameterisation gives them.

A group also says which weights of its tensors there are (`masks`), for an optimiser that keeps state for those alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedsign.errors import ConfigError
from fedsign.parameterisation.masks import Mask
from fedsign.parameterisation.packed import Packed, PackedAdamW, PackedSGD
from fedsign.parameterisation.plan import Plan, TensorPlan
from fedsign.parameterisation.schemes import Scheme
from fedsign.parameterisation.sparsity.base import MaskRule
from fedsign.parameterisation.sparsity.changing import Changing, Masked
from fedsign.sections import OptimizerPart
from fedsign.traits import OptimizerTraits

Group = dict[str, Any]


def grouped_optimizer(
    part: OptimizerPart,
    model: nn.Module,
    lr: float,
    weight_decay: float,
    *,
    plan: Plan,
    masks: Mapping[str, Mask],
    rule: MaskRule | None,
) -> torch.optim.Optimizer:
    """A fresh optimizer whose groups have the plan's rates; under a `rule` it changes the masks.

    Raises:
        ConfigError: the optimiser cannot have groups, or there is no rule for its rates.
    """
    groups = groups_of(model, plan, masks)
    optimizer: torch.optim.Optimizer
    if OptimizerTraits.of(part.name).takes_model:
        optimizer = part.build(model, lr, weight_decay)
        (whole,) = optimizer.param_groups
        optimizer.param_groups[:] = [{**whole, **group} for group in groups]
    else:
        optimizer = part.build(groups, lr, weight_decay)
    _set_rates(optimizer, part, plan.scheme, lr, weight_decay)
    if rule is not None:
        if not isinstance(optimizer, Packed):
            raise ConfigError(
                f"client.optimizer.name={part.name} was given with sparsity.name={rule.name}, but its state would not follow masks "
                "that change; use packed_sgd or packed_adamw."
            )
        tensors = [Masked(model.get_parameter(name), mask, plan.tensors[name].density) for name, mask in masks.items()]
        optimizer.take_step = Changing(rule, tensors).step
    return optimizer


def groups_of(model: nn.Module, plan: Plan, masks: Mapping[str, Mask]) -> list[Group]:
    """Parameters whose rates and decay are the same, in the model's order."""
    groups: dict[tuple[float, float, bool], Group] = {}
    for name, tensor in plan.tensors.items():
        key = (tensor.adam_rate, tensor.sgd_rate, tensor.decays)
        group = groups.setdefault(key, {"params": [], "masks": [], "plan": tensor})
        group["params"].append(model.get_parameter(name))
        group["masks"].append(masks.get(name))
    return list(groups.values())


def _set_rates(
    optimizer: torch.optim.Optimizer, part: OptimizerPart, scheme: Scheme, lr: float, weight_decay: float
) -> None:
    is_sgd = isinstance(optimizer, torch.optim.SGD | PackedSGD)
    if not (is_sgd or isinstance(optimizer, torch.optim.Adam | PackedAdamW) or scheme.name == "sp"):
        raise ConfigError(
            f"client.optimizer.name={part.name} was given with parameterisation.name={scheme.name}, which has rules for "
            "SGD, Adam and AdamW only; use sgd, adam, adamw, packed_sgd or packed_adamw, or parameterisation.name=sp."
        )
    for group in optimizer.param_groups:
        tensor: TensorPlan = group["plan"]
        rate = tensor.sgd_rate if is_sgd else tensor.adam_rate
        group["lr"] = lr * rate
        if not tensor.decays:
            group["weight_decay"] = 0.0
        elif scheme.decay == "base":
            group["weight_decay"] = weight_decay / rate
            if weight_decay and isinstance(optimizer, torch.optim.Adam) and not group["decoupled_weight_decay"]:
                raise ConfigError(
                    f"client.optimizer.name={part.name} was given with parameterisation.decay=base, but its weight decay is a part "
                    "of the gradient that Adam rescales; use adamw, or parameterisation.decay=rate."
                )
