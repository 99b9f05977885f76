"""A Parquet file, one sample a row; its columns have types."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedsign.data.base import Dataset
from fedsign.data.columns import Columns, TargetType, frame_of_table, from_tables
from fedsign.extras import require
from fedsign.traits import declares

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


@declares(frame=frame_of_table)
def parquet(
    seed: int,
    *,
    path: str = "data.parquet",
    test_path: str | None = None,
    target: str = "target",
    features: tuple[str, ...] = (),
    categorical: tuple[str, ...] = (),
    owner: str | None = None,
    target_type: TargetType = "auto",
    scale_target: bool = False,
    class_names: tuple[str, ...] = (),
    levels: dict[str, tuple[str, ...]] | None = None,
    unused: tuple[str, ...] = (),
    strict: bool = False,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
) -> Dataset:
    """Features [n, F]; see [Note: columns] in `fedsign.data.columns`.  Nulls are missing values.

    Raises:
        ConfigError: pyarrow, which reads these files, is not installed.
        DataError: see `from_tables`.
    """
    require("pyarrow", extra="tables", what="data.name=parquet")

    def read(file: "Path") -> "pd.DataFrame":
        import pandas as pd

        table: pd.DataFrame = pd.read_parquet(file, engine="pyarrow")
        return table

    columns = Columns(
        target=target,
        features=features,
        categorical=categorical,
        owner=owner,
        target_type=target_type,
        scale_target=scale_target,
        class_names=class_names,
        levels=levels or {},
        unused=unused,
        strict=strict,
    )
    return from_tables(read, path, test_path, columns, test_fraction=test_fraction, seed=seed)
