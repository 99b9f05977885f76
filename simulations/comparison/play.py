"""The former name of `simulations.comparison.execution`."""

import sys

from fedsign.former_names import warn
from simulations.comparison import execution

warn(__name__, "simulations.comparison.execution", stacklevel=4)
sys.modules[__name__] = execution
