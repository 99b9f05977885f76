"""The former name of `fedsign.analyze`."""

import sys

from fedsign import analyze
from fedsign.former_names import warn

warn(__name__, "fedsign.analyze", stacklevel=4)
sys.modules[__name__] = analyze
