"""A Parquet file: one sample per row, in typed columns."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedsign.data.columns import tabular
from fedsign.extras import require

if TYPE_CHECKING:
    import pandas as pd


@tabular
def parquet(file: Path) -> "pd.DataFrame":
    """Features [n, F]; see [Note: columns] in `fedsign.data.columns`.  Nulls are missing values.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    require("pyarrow", extra="tables", feature="data.name=parquet")
    import pandas as pd

    table: pd.DataFrame = pd.read_parquet(file, engine="pyarrow")
    return table
