"""A CSV file: a line with the columns' names, then one sample a line."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedsign.data.base import Dataset
from fedsign.data.columns import Columns, TargetType, frame_of_table, from_tables
from fedsign.traits import declares

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


@declares(frame=frame_of_table)
def csv(
    seed: int,
    *,
    path: str = "data.csv",
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
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ",",
) -> Dataset:
    """Features [n, F]; see [Note: columns].  Empty fields, `NA` and `nan` are missing values."""

    def read(file: "Path") -> "pd.DataFrame":
        import pandas as pd  # half a second that other data sets do not need

        table: pd.DataFrame = pd.read_csv(file, sep=delimiter, low_memory=False)
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
