"""What the cohort path adds to the configuration's table [client]."""

from typing import Literal

from fedsign.sections import NonNegative, Table


class CohortKeys(Table):
    """In [client]."""

    path: Literal["auto", "sequential", "cohort"] = "sequential"  # cohort: many clients as one stack of tensors
    chunk: NonNegative = 0  # how many clients a stack holds at most; 0: by a rule
