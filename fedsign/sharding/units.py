"""Units: the groups of parameters that are unsharded and resharded together.

A unit holds the parameters of its module except those of nested units.  Parameters tied across units belong to the
model's own unit, which is unsharded for as long as any other unit is.
"""

from collections.abc import Iterable

import torch
from torch import nn

from fedsign.errors import ConfigError

Named = list[tuple[str, nn.Parameter]]  # with the first name in the model


def parts_of(model: nn.Module, units: Iterable[nn.Module] | None) -> list[tuple[nn.Module, list[Named]]]:
    """Each unit's module with its parameters, in lists of equal dtype, device, and `requires_grad`; the model first.

    Raises:
        ConfigError: a unit is not a module of the model.
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
        if param.is_floating_point():  # others cannot be trained, and stay in the model
            kind = (param.requires_grad, param.dtype, param.device)
            alike[id(owners[id(param)])].setdefault(kind, []).append((name, param))
    return [(module, list(alike[owner].values())) for owner, module in parts.items()]


def _assign(
    module: nn.Module, unit: nn.Module, chosen: set[int], model: nn.Module, owners: dict[int, nn.Module]
) -> None:
    """Assign each parameter to a unit, from the model down."""
    if id(module) in chosen:
        unit = module
    for param in module.parameters(recurse=False):
        owner = owners.setdefault(id(param), unit)
        if owner is not unit:  # tied across units
            owners[id(param)] = model
    for child in module.children():
        _assign(child, unit, chosen, model, owners)


def default_units(model: nn.Module) -> list[nn.Module]:
    """The children, if they have parameters, of every outermost ModuleList and Sequential."""
    units: list[nn.Module] = []
    for child in model.children():
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if isinstance(model, nn.ModuleList | nn.Sequential) and is_called:
            units += [child] if any(True for _ in child.parameters()) else []
        else:
            units += default_units(child)
    return list({id(each): each for each in units}.values())
