"""results.parquet beside results.csv: the same rows, numbers as numbers, in pieces that fit into memory."""

from __future__ import annotations

import os
from pathlib import Path

from kvreplay.errors import Error
from kvreplay.program import not_installed
from kvreplay.results import COLUMNS, NUMBERS


def write_parquet(folder: Path) -> Path:
    """Of a folder of results. What is undefined, an empty field, is null where there are numbers."""
    try:
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet
    except ModuleNotFoundError as missing:
        raise not_installed("sweep", missing) from missing
    source, path = folder / "results.csv", folder / "results.parquet"
    partial = path.with_name(f"{path.name}.partial")
    kinds = {name: pa.float64() if name in NUMBERS else pa.string() for name in COLUMNS}
    try:
        rows = pyarrow.csv.open_csv(
            source, convert_options=pyarrow.csv.ConvertOptions(column_types=kinds, null_values=[""])
        )
        with pyarrow.parquet.ParquetWriter(partial, rows.schema) as writer:
            for batch in rows:
                writer.write_batch(batch)
    except (OSError, pa.ArrowException) as problem:
        partial.unlink(missing_ok=True)
        raise Error(str(path), "cannot be written", "", str(problem).split("\n")[0]) from problem
    os.replace(partial, path)
    return path
