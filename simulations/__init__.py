"""Run, resume and compare experiments.

Resolves the names of the Python API on first use: `simulations.run` is `fedsign.run`.
"""

from typing import TYPE_CHECKING, Any

from fedsign.extensions import load, python_api

if TYPE_CHECKING:
    from fedsign import Run as Run
    from fedsign import load_run as load_run
    from fedsign import run as run


def __getattr__(name: str) -> Any:
    if name in python_api():
        return load(python_api()[name])
    raise AttributeError(f"module 'simulations' has no attribute '{name}'")
