"""The table of recipes.

A new recipe is one new file in the folder of its subject and one line in the table.  Its module holds RECIPE, or
`recipe(data, root)` for one that can be checked on several data sets, with DATA to name them, the first one being the default.
"""

import importlib

from fedsign.errors import ConfigError
from fedsign.plugins import names_of
from fedsign.registry import nearest
from simulations.recipes.base import Recipe

_MODULES = {
    "fedsign-beats-fedavg-digits": "simulations.recipes.algorithms.fedsign_beats_fedavg_digits",
    "feddyn-faster-digits": "simulations.recipes.algorithms.feddyn_faster_digits",
    "feddyn-fixed-point": "simulations.recipes.algorithms.feddyn_fixed_point",
    "fedsign-table": "simulations.recipes.algorithms.fedsign_table",
    "niid-bench": "simulations.recipes.algorithms.niid_bench",
    "robust-table": "simulations.recipes.algorithms.robust_table",
    "valley-seven-noises": "simulations.recipes.valleys.valley_seven_noises",
    "valley-sign-ratio": "simulations.recipes.valleys.valley_sign_ratio",
    "valley-special-directions": "simulations.recipes.valleys.valley_special_directions",
    "valley-bn-init": "simulations.recipes.valleys.valley_bn_init",
    "valley-hyperparameters": "simulations.recipes.valleys.valley_hyperparameters",
    "valley-interpolation-batch-size": "simulations.recipes.valleys.valley_interpolation_batch_size",
    "soup-sign-ratio": "simulations.recipes.valleys.soup_sign_ratio",
    "valley-parameter-groups": "simulations.recipes.valleys.valley_parameter_groups",
    "smupar-coordinate-check": "simulations.recipes.smupar.smupar_coordinate_check",
    "smupar-lr-transfer": "simulations.recipes.smupar.smupar_lr_transfer",
    "smupar-init-transfer": "simulations.recipes.smupar.smupar_init_transfer",
    "smupar-ablation": "simulations.recipes.smupar.smupar_ablation",
    "smupar-dynamic": "simulations.recipes.smupar.smupar_dynamic",
    "smupar-pareto": "simulations.recipes.smupar.smupar_pareto",
    "softmax-demo": "simulations.recipes.valleys.softmax_demo",
    "relu-demo": "simulations.recipes.valleys.relu_demo",
    "activation-confusion": "simulations.recipes.valleys.activation_confusion",
    "lisa-memory": "simulations.recipes.lisa.lisa_memory",
    "lisa-convergence": "simulations.recipes.lisa.lisa_convergence",
    "lisa-ablation": "simulations.recipes.lisa.lisa_ablation",
    "lisa-weight-norms": "simulations.recipes.lisa.lisa_weight_norms",
    "lisa-speed": "simulations.recipes.lisa.lisa_speed",
    "federated-lisa": "simulations.recipes.lisa.federated_lisa",
    "fg2u-unbiased": "simulations.recipes.fg2u.fg2u_unbiased",
    "condensation-table": "simulations.recipes.fg2u.condensation_table",
    "two-phase": "simulations.recipes.fg2u.two_phase",
    "fg2u-memory": "simulations.recipes.fg2u.fg2u_memory",
    "one-shot-federation": "simulations.recipes.fg2u.one_shot_federation",
    "learned-gamma": "simulations.recipes.fg2u.learned_gamma",
    "pde-coefficients": "simulations.recipes.fg2u.pde_coefficients",
    "online-adaptation": "simulations.recipes.fg2u.online_adaptation",
    "federated-smupar": "simulations.recipes.smupar.federated_smupar",
    "federated-llm": "simulations.recipes.language.federated_llm",
}


def claims() -> dict[str, str]:
    """Name -> claim, of all recipes."""
    return {name: get(name).claim for name in _MODULES}


def data_of(name: str) -> tuple[str, ...]:
    """The data sets that a recipe can be checked on; empty where there is no choice."""
    return tuple(getattr(importlib.import_module(_module(name)), "DATA", ()))


def get(name: str, *, data: str = "", root: str = "") -> Recipe:
    """A recipe by its name; `root` is the folder of data that lies in files.

    Raises:
        ConfigError: there is none of that name, or it knows no such data.
    """
    module, known = importlib.import_module(_module(name)), data_of(name)
    if data and data not in known:
        raise ConfigError(
            f"recipe '{name}' was asked for on '{data}'.{nearest(data, known)} "
            + (f"Expected is one of {', '.join(known)}." if known else "It has data of its own: drop --data.")
        )
    if root and (not known or "root" not in names_of("dataset", data or known[0])):
        raise ConfigError(f"recipe '{name}' reads no files of {data or 'any data set'}: drop --data-root.")
    found: Recipe = module.recipe(data or known[0], root) if known else module.RECIPE
    return found


def _module(name: str) -> str:
    if name not in _MODULES:
        raise ConfigError(
            f"there is no recipe '{name}'.{nearest(name, _MODULES)} 'fedsign reproduce --list' names them all."
        )
    return _MODULES[name]
