"""A CSV file: a line with the columns' names, then one sample a line."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedsign.data.columns import tabular

if TYPE_CHECKING:
    import pandas as pd


@tabular
def csv(file: Path, *, delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",") -> "pd.DataFrame":
    """Features [n, F]; see [Note: columns].  Empty fields, `NA` and `nan` are missing values."""
    import pandas as pd  # half a second that other data sets do not need

    table: pd.DataFrame = pd.read_csv(file, sep=delimiter, low_memory=False)
    return table
