"""A run's records as plain numbers: for trackers, and as a DataFrame."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fedsign.storage.results import Record

if TYPE_CHECKING:
    import pandas as pd

_COUNTED = ("clients", "failures")


def numbers_of(record: Record) -> dict[str, float]:
    """Return a record's numbers without its round. Clients and failures become counts, non-finite values NaN.

    >>> numbers_of({"round": 3, "accuracy": 0.5, "loss": None, "clients": [4, 7], "failures": []})
    {'accuracy': 0.5, 'loss': nan, 'clients': 2, 'failures': 0}
    """
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if key in _COUNTED:
            numbers[key] = len(value)
        elif value is None:  # see RunFolder.append: JSON has no NaN
            numbers[key] = math.nan
        elif isinstance(value, dict):
            numbers |= {f"{key}.{inner}": number for inner, number in numbers_of(value).items()}
        # bool is an int in Python
        elif isinstance(value, int | float) and not isinstance(value, bool) and key != "round":
            numbers[key] = value
    return numbers


def to_frame(records: Iterable[Record], timings: Iterable[Record] = ()) -> "pd.DataFrame":
    """Return a DataFrame indexed by round, joined with the columns of `timings`."""
    import pandas as pd  # takes half a second to import, and most runs do not need it

    rows = {record["round"]: numbers_of(record) for record in records}
    seconds = {record["round"]: numbers_of(record) for record in timings}
    merged = [numbers | seconds.get(round, {}) for round, numbers in rows.items()]
    return pd.DataFrame(merged, index=pd.Index(list(rows), name="round", dtype="int64"))
