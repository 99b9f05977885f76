"""Running experiments: `from simulations import run, load_run`, and what capabilities add, such as `compare`.

>>> from simulations import run
>>> result = run({"rounds": 1, "callbacks": [], "results": {"root": str(tmp_path)}})  # doctest: +SKIP
>>> result.rounds[-1]["accuracy"]  # doctest: +SKIP
0.41
"""

from typing import TYPE_CHECKING, Any

from fedsign.capabilities import CAPABILITIES
from fedsign.extensions import load

if TYPE_CHECKING:
    from simulations.api import Run, load_run, run

__all__ = ["Run", "load_run", "run"]

_CORE = {name: f"simulations.api:{name}" for name in ("Run", "load_run", "run")}


def __getattr__(name: str) -> Any:
    # Lazily, so that `fedsign --help` does not wait for torch and Flower.
    found = {key: target for each in CAPABILITIES.values() for key, target in each.api.items()} | _CORE
    if name in found:
        return load(found[name])
    raise AttributeError(f"module 'simulations' has no attribute '{name}'")
