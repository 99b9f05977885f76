"""FedSign: a framework for federated-learning research on Flower and PyTorch.

>>> import fedsign, tempfile
>>> done = fedsign.run({"rounds": 1, "callbacks": [], "results": {"root": tempfile.mkdtemp()}})
>>> fedsign.load_run(done.path).rounds[0]["round"]
1

The API is imported lazily: `import fedsign` imports neither torch nor Flower.
"""

from typing import TYPE_CHECKING, Any

from fedsign import analyze as analyze
from fedsign._version import __version__ as __version__

if TYPE_CHECKING:
    from fedsign.comparison.folder import Comparison as Comparison  # capability: comparison
    from fedsign.comparison.folder import load_comparison as load_comparison  # capability: comparison
    from simulations.ablation.execution import ablate as ablate  # capability: ablation
    from simulations.api import Run as Run
    from simulations.api import load_run as load_run
    from simulations.api import run as run
    from simulations.comparison.execution import compare as compare  # capability: comparison


def __getattr__(name: str) -> Any:
    from fedsign.extensions import load, python_api

    if name == "analyse":  # the former name of analyze
        import importlib

        return importlib.import_module("fedsign.analyse")
    if name in python_api():
        return load(python_api()[name])
    raise AttributeError(f"module 'fedsign' has no attribute '{name}'")


def __dir__() -> list[str]:
    from fedsign.extensions import python_api

    return sorted(["__version__", "analyze", *python_api()])
