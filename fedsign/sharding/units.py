"""Which parameters come and go together.

A unit has the parameters of its module that are in no unit within it.  One that several units share (tied weights) belongs to the
model itself, whose parameters are there for as long as any unit's.
"""

from collections.abc import Iterable

import torch
from torch import nn

from fedsign.errors import ConfigError

Named = list[tuple[str, nn.Parameter]]  # by their first name in the model


def parts_of(model: nn.Module, units: Iterable[nn.Module] | None) -> list[tuple[nn.Module, list[Named]]]:
    """Each unit's module with its own parameters, in lists of one type and device, all trained or none; the model's own first.

    Raises:
        ConfigError: a unit is no module of the model.
    """
    modules = list(model.modules())
    chosen = default_units(model) if units is None else list(units)
    if any(all(unit is not module for module in modules) for unit in chosen):
        raise ConfigError("a unit was given that is no module of the model; name modules that model.modules() gives.")
    owners: dict[int, nn.Module] = {}
    _assign(model, model, {id(unit) for unit in chosen}, model, owners)
    parts = {id(module): module for module in [model, *chosen]}
    alike: dict[int, dict[tuple[bool, torch.dtype, torch.device], Named]] = {owner: {} for owner in parts}
    for name, param in model.named_parameters():
        if param.is_floating_point():
            kind = (param.requires_grad, param.dtype, param.device)
            alike[id(owners[id(param)])].setdefault(kind, []).append((name, param))
    return [(module, list(alike[owner].values())) for owner, module in parts.items()]


def _assign(
    module: nn.Module, unit: nn.Module, chosen: set[int], model: nn.Module, owners: dict[int, nn.Module]
) -> None:
    """Which unit owns each parameter, from the model down."""
    if id(module) in chosen:
        unit = module
    for param in module.parameters(recurse=False):
        owner = owners.setdefault(id(param), unit)
        if owner is not unit:
            owners[id(param)] = model
    for child in module.children():
        _assign(child, unit, chosen, model, owners)


def default_units(model: nn.Module) -> list[nn.Module]:
    """The children with parameters of every ModuleList and Sequential that is in no other one."""
    found: list[nn.Module] = []
    for child in model.children():
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if isinstance(model, nn.ModuleList | nn.Sequential) and is_called:
            found += [child] if any(True for _ in child.parameters()) else []
        else:
            found += default_units(child)
    return list({id(each): each for each in found}.values())
