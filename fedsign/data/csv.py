"""A CSV file: a header with the names of the columns, then one sample per row."""

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedsign.data.columns import tabular
from fedsign.data.spelling import DECIMAL, are_separated
from fedsign.data.table_files import READ_AS
from fedsign.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_DELIMITERS = ",;\t|"
_UTF_16 = b"\xff\xfe", b"\xfe\xff"  # byte order marks


@tabular
def csv(
    file: Path,
    *,
    delimiter: Annotated[str, Field(max_length=1)] = "",
    # None: not stored, so that digests of experiments stay as they are
    decimal: Literal[".", ","] | None = None,
    thousands: Literal[".", ","] | None = None,
    encoding: str | None = None,
) -> "pd.DataFrame":
    """Features [n, F]; see [Note: columns].  Empty fields, `NA` and `nan` are missing values.

    Without a delimiter, it is the comma, semicolon, tab or bar that occurs most often in the header.  By default, the
    decimal mark is a point, or the comma if points separate thousands, and the text is UTF-8.

    Raises:
        DataError: the file is not text in this encoding, or one mark has two meanings.
    """
    import pandas as pd  # takes half a second, which other data sets do not need

    if decimal and decimal == thousands:
        raise DataError(
            f"data.decimal={decimal} was given with data.thousands={thousands}; a mark has one meaning: leave the one "
            "or the other out."
        )
    mark = decimal or (DECIMAL[thousands] if thousands else ".")

    encoding = encoding or "utf-8"
    if file.is_dir():
        raise DataError(f"{file} is a folder; name one file, or write the table as parquet, which takes folders.")
    try:
        if not delimiter:
            with file.open(encoding=encoding, errors="replace") as opened:
                header = opened.readline()
            delimiter = max(_DELIMITERS, key=header.count)  # the comma, if there is none
        # low_memory infers types chunk by chunk, and may mix numbers and texts within a column
        read = partial(
            pd.read_csv,
            file,
            sep=delimiter,
            encoding=encoding,
            skipinitialspace=True,  # `a, b` has a column b
            low_memory=False,
            index_col=False,  # else rows with one field more than the header shift all columns by one
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table: pd.DataFrame = read(decimal=mark)
        header = read(header=None, nrows=1, dtype=str, keep_default_na=False)
        # pandas would number columns of one name
        table.columns = [own or name for own, name in zip(header.iloc[0], table.columns, strict=True)]
    except pd.errors.ParserWarning as error:
        raise ValueError("its rows have more fields than its first line") from error
    except LookupError as error:
        raise DataError(
            f"data.encoding={encoding} is no encoding that Python knows; use one such as utf-8, cp1252, or utf-16."
        ) from error
    except UnicodeError as error:
        raise _decoding_error(file, encoding, error) from error
    if thousands:
        _join_thousands(table, thousands)
    if delimiter != ",":
        table.attrs[READ_AS] = f"the fields of {file} are separated by {delimiter!r}."
    return table


def _join_thousands(table: "pd.DataFrame", mark: str) -> None:
    """Turn columns of numbers with a separator of thousands into numbers.

    `read_csv(thousands=".")` would also read 1.5 as 15, and a date as a number.
    """
    import pandas as pd

    for name, column in table.items():
        if pd.api.types.is_numeric_dtype(column.dtype) or not are_separated(column.dropna().astype(str), mark):
            continue
        numbers = column.str.replace(mark, "", regex=False).str.replace(DECIMAL[mark], ".", regex=False)
        table[name] = pd.to_numeric(numbers)


def _decoding_error(file: Path, encoding: str, error: UnicodeError) -> Exception:
    """An error that names the likely encoding."""
    with file.open("rb") as opened:
        start = opened.read(4096)
    if start.startswith(_UTF_16):
        remedy = "it is UTF-16: use --set data.encoding=utf-16, or save it as UTF-8"
    elif b"\0" in start:
        return ValueError("it has zero bytes, and is no text")
    else:
        remedy = "if it is Latin-1, as of Excel in Western Europe, use --set data.encoding=cp1252, or save it as UTF-8"
    byte = f" (byte 0x{error.object[error.start]:02x})" if isinstance(error, UnicodeDecodeError) else ""
    return DataError(f"{file} is not text in {encoding.upper()}{byte}; {remedy}.")
