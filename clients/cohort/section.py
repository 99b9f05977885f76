"""The cohort path's keys in the configuration table [client]."""

from typing import Literal

from fedsign.sections import NonNegative, Table


class CohortKeys(Table):
    """Keys in [client]."""

    path: Literal["auto", "sequential", "cohort"] = "sequential"  # cohort: train many clients as one stack of tensors
    chunk: NonNegative = 0  # maximum number of clients per stack; 0: automatic
