"""Running experiments: `from simulations import run, compare, load_run, load_comparison`.

>>> from simulations import run
>>> result = run({"rounds": 1, "callbacks": [], "results": {"root": str(tmp_path)}})  # doctest: +SKIP
>>> result.rounds[-1]["accuracy"]  # doctest: +SKIP
0.41
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsign.comparison_folder import Comparison, load_comparison
    from simulations.api import Run, load_run, run
    from simulations.comparison.play import compare

__all__ = ["Comparison", "Run", "compare", "load_comparison", "load_run", "run"]

_HOMES = {
    "Comparison": "fedsign.comparison_folder",
    "Run": "simulations.api",
    "compare": "simulations.comparison.play",
    "load_comparison": "fedsign.comparison_folder",
    "load_run": "simulations.api",
    "run": "simulations.api",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that `fedsign --help` does not wait for torch and Flower.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'simulations' has no attribute '{name}'")
