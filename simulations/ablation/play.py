"""The former name of `simulations.ablation.execution`."""

import sys

from fedsign.former_names import warn
from simulations.ablation import execution

warn(__name__, "simulations.ablation.execution", stacklevel=4)
sys.modules[__name__] = execution
