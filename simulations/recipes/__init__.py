"""Recipes: a claim, a figure or a table as one named function with a computed verdict.

A new recipe is one new file and one line in the table.
"""

import importlib

from fedsign.errors import ConfigError
from fedsign.registry import nearest
from simulations.recipes.base import Finding, Recipe

_MODULES = {
    "fedsign-beats-fedavg-digits": "simulations.recipes.fedsign_beats_fedavg_digits",
    "feddyn-faster-digits": "simulations.recipes.feddyn_faster_digits",
    "feddyn-fixed-point": "simulations.recipes.feddyn_fixed_point",
}


def table() -> dict[str, str]:
    """Name -> claim, of all recipes."""
    return {name: get(name).claim for name in _MODULES}


def get(name: str) -> Recipe:
    """A recipe by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _MODULES:
        raise ConfigError(
            f"there is no recipe '{name}'.{nearest(name, _MODULES)} 'fedsign reproduce --list' names them all."
        )
    found: Recipe = importlib.import_module(_MODULES[name]).RECIPE
    return found


__all__ = ["Finding", "Recipe", "get", "table"]
