"""Tables: your own tables and arrays: CSV, Parquet, NPZ."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="your own tables and arrays: CSV, Parquet, NPZ",
    modules=(
        "fedsign.data.columns",
        "fedsign.data.csv",
        "fedsign.data.npz",
        "fedsign.data.parquet",
        "fedsign.data.table_files",
    ),
    rows={
        "dataset": {
            "csv": ("fedsign.data.csv:csv", "your table in a CSV file"),
            "parquet": ("fedsign.data.parquet:parquet", "your table in a Parquet file"),
            "npz": ("fedsign.data.npz:npz", "your arrays in a NumPy .npz file"),
        }
    },
    named_by={"csv": "path", "npz": "path", "parquet": "path"},
    extras=("tables",),
)
