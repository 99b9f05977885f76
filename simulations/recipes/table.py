"""The table of recipes: every `Recipe` defined by a module of this package.

To add one, write a function decorated with `@recipe` in the module of its topic.
"""

import importlib
import pkgutil
from dataclasses import replace
from functools import cache, partial

from fedsign.errors import ConfigError, nearest
from simulations import recipes
from simulations.recipes.base import Recipe
from simulations.recipes.where import where_of


@cache
def all_recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    modules = [each.name for each in pkgutil.walk_packages(recipes.__path__, f"{recipes.__name__}.") if not each.ispkg]
    # a recipe that another module imports appears twice, under one name
    things = [thing for name in modules for thing in vars(importlib.import_module(name)).values()]
    return {thing.name: thing for thing in things if isinstance(thing, Recipe)}


def get(name: str, *, data: str = "", root: str = "", model: str = "") -> Recipe:
    """Return a recipe by name, with other data or another model if given; then no verdict may be expected.

    Raises:
        ConfigError: there is no such recipe, data set or model, or the recipe's data are fixed.
    """
    if name not in all_recipes():
        raise ConfigError(
            f"there is no recipe '{name}'.{nearest(name, all_recipes())} 'fedsign reproduce --list' names them all."
        )
    recipe = all_recipes()[name]
    overrides = {"--data": data, "--data-root": root, "--model": model}
    if recipe.budget is None:
        if given := [option for option, value in overrides.items() if value]:
            raise ConfigError(f"recipe '{name}' has data and models of its own: drop {' and '.join(given)}.")
        return recipe
    if model and not recipe.takes_model:
        raise ConfigError(f"recipe '{name}' compares models of its own: drop --model.")
    # with `data`, even the default goes through `where`: the recipe has no other
    if not any(overrides.values()) and not recipe.data:
        return recipe
    known = recipe.data or {recipe.home: recipe.expected}
    where = where_of(data or next(iter(known)), root, model)
    if not recipe.takes_other_data and where.set_name not in known:
        raise ConfigError(
            f"--data {data} was given, but what recipe '{name}' compares with was published on "
            f"{' and '.join(known)}: name that."
        )
    return replace(
        recipe,
        name=f"{name} on {where.title}",
        measure=partial(recipe.measure, where=where),
        # the recorded verdict is of the recipe's own model
        expected=None if model else known.get(where.set_name),
        where=where,
    )
