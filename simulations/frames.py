"""The lines of a run as plain numbers: for trackers, and as a DataFrame."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fedsign.storage.results import Line

if TYPE_CHECKING:
    import pandas as pd

_COUNTED = ("clients", "failures")


def numbers_of(line: Line) -> dict[str, float]:
    """The numbers of a line without its round; clients and failures as counts, what was not finite as NaN.

    >>> numbers_of({"round": 3, "accuracy": 0.5, "loss": None, "clients": [4, 7], "failures": []})
    {'accuracy': 0.5, 'loss': nan, 'clients': 2, 'failures': 0}
    """
    numbers: dict[str, float] = {}
    for key, value in line.items():
        if key in _COUNTED:
            numbers[key] = len(value)
        elif value is None:  # see RunFolder.append: JSON knows no NaN
            numbers[key] = math.nan
        elif isinstance(value, dict):
            numbers |= {f"{key}.{inner}": number for inner, number in numbers_of(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "round":
            numbers[key] = value
    return numbers


def to_frame(lines: Iterable[Line], timings: Iterable[Line] = ()) -> "pd.DataFrame":
    """One row a round, indexed by it; the columns of `timings` are joined on the right."""
    import pandas as pd  # half a second that a run does not need

    rows = {line["round"]: numbers_of(line) for line in lines}
    seconds = {line["round"]: numbers_of(line) for line in timings}
    merged = [numbers | seconds.get(round, {}) for round, numbers in rows.items()]
    return pd.DataFrame(merged, index=pd.Index(list(rows), name="round", dtype="int64"))
