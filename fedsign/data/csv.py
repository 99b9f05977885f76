"""A CSV file: a header with the names of the columns, then one sample per row."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedsign.data.columns import NOTE, tabular

if TYPE_CHECKING:
    import pandas as pd

_DELIMITERS = ",;\t|"


@tabular
def csv(file: Path, *, delimiter: Annotated[str, Field(max_length=1)] = "") -> "pd.DataFrame":
    """Features [n, F]; see [Note: columns].  Empty fields, `NA` and `nan` are missing values.

    Without a delimiter, it is the comma, semicolon, tab or bar that occurs most often in the header.
    """
    import pandas as pd  # takes half a second, which other data sets do not need

    if not delimiter:
        with file.open(encoding="utf-8", errors="replace") as opened:
            delimiter = max(_DELIMITERS, key=opened.readline().count)  # the comma, if there is none
    # low_memory infers types chunk by chunk, and may mix numbers and texts within a column
    table: pd.DataFrame = pd.read_csv(file, sep=delimiter, low_memory=False)
    if delimiter != ",":
        table.attrs[NOTE] = f"the fields of {file} are separated by {delimiter!r}."
    return table
