"""A CSV file: a header with the names of the columns, then one sample per row."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedsign.data.columns import tabular

if TYPE_CHECKING:
    import pandas as pd


@tabular
def csv(file: Path, *, delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",") -> "pd.DataFrame":
    """Features [n, F]; see [Note: columns].  Empty fields, `NA` and `nan` are missing values."""
    import pandas as pd  # takes half a second, which other data sets do not need

    # low_memory infers types chunk by chunk, and may mix numbers and texts within a column
    table: pd.DataFrame = pd.read_csv(file, sep=delimiter, low_memory=False)
    return table
