"""An optimiser whose groups have the rates and the weight decay that a model's parameterisation gives them.

A group also says which weights of its tensors there are (`masks`), for an optimiser that keeps state for those alone.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedsign.errors import ConfigError
from fedsign.optim.base import subject
from fedsign.parameterisation.masks import Mask
from fedsign.parameterisation.packed import Packed, PackedAdamW, PackedSGD
from fedsign.parameterisation.plan import Plan, Rule, TensorPlan
from fedsign.parameterisation.schemes import Scheme
from fedsign.parameterisation.sparsity.base import MaskRule
from fedsign.parameterisation.sparsity.changing import Changing, Masked
from fedsign.sections import OptimizerPart

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
    optimizer = _with_groups(part, model, groups_of(model, plan, masks), lr, weight_decay)
    moves = _rule_of(optimizer, part, plan.scheme)
    for group in optimizer.param_groups:
        _set(group, moves, lr, weight_decay, plan.scheme)
    if weight_decay and plan.scheme.decay == "base" and isinstance(optimizer, torch.optim.Adam):
        _refuse_coupled(optimizer, part)
    if rule is not None:
        _let_change(
            optimizer,
            rule,
            part,
            [
                Masked(parameter=model.get_parameter(name), mask=mask, density=plan.tensors[name].density)
                for name, mask in masks.items()
            ],
        )
    return optimizer


def _with_groups(
    part: OptimizerPart, model: nn.Module, groups: list[Group], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimiser of these groups; one that is made of a module has its one group divided into them."""
    given = subject(part.name, model)
    if given is not model:
        grouped: torch.optim.Optimizer = part.build(groups, lr, weight_decay)
        return grouped
    optimizer: torch.optim.Optimizer = part.build(model, lr, weight_decay)
    (whole,) = optimizer.param_groups
    optimizer.param_groups[:] = [{**whole, **group} for group in groups]
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


def _set(group: Group, rule: Rule, lr: float, weight_decay: float, scheme: Scheme) -> None:
    tensor: TensorPlan = group["plan"]
    rate = tensor.rate(rule)
    group["lr"] = lr * rate
    if not tensor.decays:
        group["weight_decay"] = 0.0
    elif scheme.decay == "base":
        group["weight_decay"] = weight_decay / rate


def _rule_of(optimizer: torch.optim.Optimizer, part: OptimizerPart, scheme: Scheme) -> Rule:
    if isinstance(optimizer, torch.optim.SGD | PackedSGD):
        return "sgd"
    if isinstance(optimizer, torch.optim.Adam | PackedAdamW) or scheme.name == "sp":
        return "adam"
    raise ConfigError(
        f"client.optimizer.name={part.name} was given with parameterisation.name={scheme.name}, which has rules for "
        "SGD, Adam and AdamW only; use sgd, adam, adamw, packed_sgd or packed_adamw, or parameterisation.name=sp."
    )


def _let_change(optimizer: torch.optim.Optimizer, rule: MaskRule, part: OptimizerPart, tensors: list[Masked]) -> None:
    """Have the masks changed between the optimiser's steps, from its first one on."""
    if not isinstance(optimizer, Packed):
        raise ConfigError(
            f"client.optimizer.name={part.name} was given with sparsity.name={rule.name}, but its state would not follow masks that "
            "change; use packed_sgd or packed_adamw."
        )
    optimizer.stepping = Changing(rule, tensors)


def _refuse_coupled(optimizer: torch.optim.Adam, part: OptimizerPart) -> None:
    if not optimizer.param_groups[0]["decoupled_weight_decay"]:
        raise ConfigError(
            f"client.optimizer.name={part.name} was given with parameterisation.decay=base, but its weight decay is a part of the "
            "gradient that Adam rescales; use adamw, or parameterisation.decay=rate."
        )
