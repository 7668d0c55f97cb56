"""results.csv as Parquet: the same rows and columns with types, in bounded memory."""

from __future__ import annotations

from pathlib import Path

from kvreplay.errors import DISK_FULL, Error, Refusal

WHOLE = ("budget_tokens", "boundary", "n_queries")
REAL = ("kept_tokens", "value")
TRUTH = ("open_loop", "synthetic")
PIECE = 1 << 24  # bytes of results.csv read at a time


def write_parquet(results: Path, path: Path) -> None:
    """`path` becomes what results.csv holds: int64, float64 and bool where it has numbers and truths, uint64 seeds, and
    text elsewhere. What is empty there is null in columns of numbers. Every float is the one that its digits mean."""
    try:
        import pyarrow as pa
        from pyarrow import csv, parquet
    except ModuleNotFoundError as missing:
        raise Error("Parquet", "not installed", "pip install pyarrow", str(missing), Refusal.CAPABILITY) from missing
    types = dict.fromkeys(WHOLE, pa.int64()) | dict.fromkeys(REAL, pa.float64()) | dict.fromkeys(TRUTH, pa.bool_())
    types["seed"] = pa.uint64()
    partial = path.with_name(path.name + ".partial")
    try:
        header = results.open(encoding="utf-8").readline().rstrip("\n").split(",")
        options = csv.ConvertOptions(
            column_types={name: types.get(name, pa.string()) for name in header},
            null_values=[""], true_values=["true"], false_values=["false"], strings_can_be_null=False,
        )  # fmt: skip
        rows = csv.open_csv(
            results, csv.ReadOptions(block_size=PIECE), csv.ParseOptions(newlines_in_values=True), options
        )
        with parquet.ParquetWriter(partial, rows.schema) as writer:
            for batch in rows:
                writer.write_batch(batch)
        partial.replace(path)
    except pa.ArrowInvalid as problem:
        raise Error(str(results), "unreadable", "CSV as replay writes it", str(problem)) from problem
    except OSError as problem:
        full = problem.errno in DISK_FULL
        raise Error(
            str(path), "cannot be written", "", str(problem), Refusal.RESOURCES if full else Refusal.INPUT
        ) from problem
    finally:
        partial.unlink(missing_ok=True)
