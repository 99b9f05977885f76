"""Analyses of trained models: loss valleys, linear interpolation, curvature, signs.

Each function takes runs or paths and returns an `Analysis`: numbers (`facts`, `summary`, `rows`, `arrays`, `frame()`)
and figures.  Notebooks display an `Analysis`; `write(folder)` saves it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsign.report.analysis import Analysis as Analysis
    from simulations.landscape.curvature import curvature as curvature  # capability: landscape
    from simulations.landscape.interpolate import interpolate as interpolate  # capability: landscape
    from simulations.landscape.trajectory import trajectory as trajectory  # capability: landscape
    from simulations.landscape.valley import valley as valley  # capability: landscape
    from simulations.signs.pairs import signs as signs  # capability: signs


def __getattr__(name: str) -> Any:
    from fedsign.extensions import load, python_api

    if name in python_api(__name__):
        return load(python_api(__name__)[name])
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    from fedsign.extensions import python_api

    return sorted(python_api(__name__))
