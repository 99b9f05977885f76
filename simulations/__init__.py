"""Running experiments: `from simulations import run, load_run`.

>>> from simulations import run
>>> result = run({"rounds": 1, "callbacks": [], "results": {"root": str(tmp_path)}})  # doctest: +SKIP
>>> result.rounds[-1]["accuracy"]  # doctest: +SKIP
0.41
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulations.api import Run, load_run, run

__all__ = ["Run", "load_run", "run"]


def __getattr__(name: str) -> Any:
    # Lazily, so that `fedsign --help` does not wait for torch and Flower.
    if name in __all__:
        from simulations import api

        return getattr(api, name)
    raise AttributeError(f"module 'simulations' has no attribute '{name}'")
