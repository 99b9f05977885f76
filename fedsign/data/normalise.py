"""The former name of `fedsign.data.normalize`."""

from fedsign.data.normalize import IDENTITY as IDENTITY
from fedsign.data.normalize import Normalization as Normalization
from fedsign.former_names import warn

warn(__name__, "fedsign.data.normalize")


def __getattr__(name: str) -> type[Normalization]:
    if name == "Normalisation":
        warn(name, "Normalization")
        return Normalization
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
