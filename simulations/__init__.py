"""Running experiments.  `simulations.run` is `fedsign.run`, and so are all names of the Python API."""

from typing import Any

from fedsign.extensions import load, python_api


def __getattr__(name: str) -> Any:
    if name in python_api():
        return load(python_api()[name])
    raise AttributeError(f"module 'simulations' has no attribute '{name}'")
