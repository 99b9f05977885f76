"""Renamed settings and commands: the former names are accepted, with a FutureWarning, until 0.3.

[Note: former keys] Stored runs are read under their former keys without a warning, since their users did not write
them.  Digests of a configuration use the former keys, so that a comparison finds its existing cells.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from fedsign.errors import ConfigError

KEYS = {
    "data.normalise": "data.normalize",
    "parameterisation": "parameterization",
}  # path of a key or a table -> its name
COMMANDS = {"analyse": "analyze"}  # groups of commands
RECORDS = {  # keys and names in stored results
    "centre": "center",
    "own_centre": "own_center",
    "learnt": "learned",
    "learnt_from": "learned_from",
    "sign_centred": "sign_centered",
    "sgp_centred": "sgp_centered",
    **{f"learnt_{what}": f"learned_{what}" for what in ("gamma", "loss", "accuracy", "minus_grid", "minus_start")},
}


class FormerNameWarning(FutureWarning):
    """A former name was used."""


def warn(former: str, name: str, *, stacklevel: int = 3) -> None:
    """Warn the caller's caller that a name was changed."""
    said = f"{former} is now {name}; the former name will be removed in 0.3"
    warnings.warn(said, FormerNameWarning, stacklevel=stacklevel)


def current_path(path: str, *, warns: bool = True) -> str:
    """The path of a key, also where it is given under its former name.

    >>> current_path("parameterisation.density", warns=False)
    'parameterization.density'
    """
    for former, name in KEYS.items():
        if path == former or path.startswith(f"{former}."):
            if warns:
                warn(former, name)
            return name + path.removeprefix(former)
    return path


def current_tree(tree: Mapping[str, Any], *, warns: bool = True) -> Mapping[str, Any]:
    """A configuration's tree under the current names.

    >>> current_tree({"data": {"normalise": "unit"}}, warns=False)
    {'data': {'normalize': 'unit'}}

    Raises:
        ConfigError: a key is given under both names.
    """
    for former, name in KEYS.items():
        if _holds(tree, former):
            if _holds(tree, name):
                raise ConfigError(f"{former} and {name} were both given, but they are one key; keep {name}.")
            if warns:
                warn(former, name)
            tree = _renamed(tree, former.split("."), name.rpartition(".")[2])
    return tree


def former_tree(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same under the former names; see [Note: former keys].

    >>> former_tree({"parameterization": {"name": "none"}})
    {'parameterisation': {'name': 'none'}}
    """
    for former, name in KEYS.items():
        if _holds(tree, name):
            tree = _renamed(tree, name.split("."), former.rpartition(".")[2])
    return tree


def current_record(value: Any, names: Mapping[str, str] = RECORDS) -> Any:
    """A result as it was read, under the current names.

    >>> current_record({"centre": 0.5, "rows": [{"direction": "sgp_centred"}]})
    {'center': 0.5, 'rows': [{'direction': 'sgp_centered'}]}
    """
    if isinstance(value, Mapping):
        return {names.get(key, key): current_record(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [current_record(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def _holds(tree: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return True


def _renamed(tree: Mapping[str, Any], path: list[str], leaf: str) -> dict[str, Any]:
    first, *rest = path
    if rest:
        return {**tree, first: _renamed(tree[first], rest, leaf)}
    return {leaf if key == first else key: value for key, value in tree.items()}
