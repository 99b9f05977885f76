"""The recipes: every `Recipe` that a module of this package defines.

A new recipe is a function in the module of its subject, under `@recipe`.
"""

import importlib
import pkgutil
from dataclasses import replace
from functools import cache, partial

from fedsign.errors import ConfigError
from fedsign.plugins import names_of
from fedsign.registry import nearest, one_of
from simulations import recipes
from simulations.recipes.base import Recipe


@cache
def all_recipes() -> dict[str, Recipe]:
    """By name."""
    modules = [each.name for each in pkgutil.walk_packages(recipes.__path__, f"{recipes.__name__}.") if not each.ispkg]
    things = [thing for name in modules for thing in vars(importlib.import_module(name)).values()]
    return {thing.name: thing for thing in things if isinstance(thing, Recipe)}


def get(name: str, *, data: str = "", root: str = "") -> Recipe:
    """A recipe by its name; `root` is the folder of data that lies in files.

    Raises:
        ConfigError: there is none of that name, or it knows no such data.
    """
    if name not in all_recipes():
        raise ConfigError(
            f"there is no recipe '{name}'.{nearest(name, all_recipes())} 'fedsign reproduce --list' names them all."
        )
    recipe = all_recipes()[name]
    known = list(recipe.data)
    if data and data not in known:
        raise ConfigError(
            f"recipe '{name}' was asked for on '{data}'."
            + (f"{one_of(data, known)}." if known else " It has data of its own: drop --data.")
        )
    data = data or next(iter(known), "")
    if root and not (data and "root" in names_of("dataset", data)):
        raise ConfigError(f"recipe '{name}' reads no files of {data or 'any data set'}: drop --data-root.")
    if not data:
        return recipe
    measure = partial(recipe.measure, data=data, root=root)
    return replace(recipe, name=f"{name} on {data}", measure=measure, expected=recipe.data[data])
