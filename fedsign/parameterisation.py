"""The former name of `fedsign.parameterization`."""

from fedsign.former_names import import_under

import_under(__name__, "fedsign.parameterization")
