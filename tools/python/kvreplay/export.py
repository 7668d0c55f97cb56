"""`kvreplay export RUN -o FILE`: the numbers of a run as one table with types, or its sets in one HDF5 file."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.errors import DISK_FULL, Error, Refusal
from kvreplay.program import Parser, exit_code, require_format
from kvreplay.run_folder import require_run

if TYPE_CHECKING:
    from kvreplay.results import Run

WHOLE = ("budget_tokens", "boundary", "n_queries")
REAL = ("kept_tokens", "value")
TRUTH = ("open_loop", "synthetic")
PIECE = 1 << 24  # bytes of results.csv read at a time


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file for the block to write, which gets the name `path` once it is complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        partial.replace(path)
    except (OSError, RuntimeError) as problem:  # h5py raises the latter where it closes a file
        full = getattr(problem, "errno", None) in DISK_FULL or "errno = 28" in str(problem)
        code = Refusal.RESOURCES if full else Refusal.INPUT
        raise Error(
            str(path), "cannot be written", "", getattr(problem, "strerror", None) or str(problem), code
        ) from problem
    finally:
        partial.unlink(missing_ok=True)


def write_table(results: Path, path: Path) -> None:
    """Writes the rows of results.csv to `path`, whose name ends in .parquet or .arrow. Numbers are int64 or float64,
    truth values bool, seeds uint64, and everything else text. Empty numbers are null. Every float is the one that its
    digits denote. The memory is that of some thousand rows, whatever their number."""
    try:
        import pyarrow as pa
        from pyarrow import csv, ipc, parquet
    except ModuleNotFoundError as missing:
        what = path.suffix[1:].capitalize()
        raise Error(what, "not installed", "pip install pyarrow", str(missing), Refusal.CAPABILITY) from missing
    types = dict.fromkeys(WHOLE, pa.int64()) | dict.fromkeys(REAL, pa.float64()) | dict.fromkeys(TRUTH, pa.bool_())
    types["seed"] = pa.uint64()
    writer_of = ipc.new_file if path.suffix.lower() == ".arrow" else parquet.ParquetWriter
    try:
        with replacing(path) as partial:
            header = results.open(encoding="utf-8").readline().rstrip("\n").split(",")
            options = csv.ConvertOptions(
                column_types={name: types.get(name, pa.string()) for name in header},
                null_values=[""], true_values=["true"], false_values=["false"], strings_can_be_null=False,
            )  # fmt: skip
            rows = csv.open_csv(
                results, csv.ReadOptions(block_size=PIECE), csv.ParseOptions(newlines_in_values=True), options
            )
            with writer_of(str(partial), rows.schema) as writer:
                for batch in rows:
                    writer.write_batch(batch)
    except pa.ArrowInvalid as problem:
        raise Error(str(results), "unreadable", "CSV written by kvreplay replay", str(problem)) from problem


def write_selections(run: Run, path: Path) -> None:
    """`path` becomes selections.h5 of format 1: the traces and cells of all files of the run in one."""
    import h5py
    import numpy as np

    with replacing(path) as partial, h5py.File(partial, "w", libver=("v108", "v110")) as joined:
        joined.attrs.update({"format": np.bytes_("kvselections"), "version": 1})
        for trace in run.stored_traces:
            file = run.cells_file(trace)
            for kind in ("traces", "cells"):
                for name, group in file.get(kind, {}).items():
                    if name not in joined.require_group(kind):  # equal traces of two names share their cells
                        file.copy(group, joined[kind], name)


def export(arguments: argparse.Namespace) -> None:
    """Writes the file in the format that its name says."""
    require_format("-o", arguments.output, ".parquet", ".arrow", ".csv", ".h5")
    require_run(arguments.run)

    from kvreplay.results import Run

    run, path = Run(arguments.run), arguments.output
    match path.suffix.lower():
        case ".h5":
            write_selections(run, path)
        case ".csv":
            with replacing(path) as partial:
                shutil.copyfile(run.folder / "results.csv", partial)
        case _:
            write_table(run.folder / "results.csv", path)
    print(path)


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay export",
        writes_files=True,
        description="Writes the numbers of a run as one table, or its kept sets as one HDF5 file (selections.h5 of "
        "format 1).",
        examples=("kvreplay export out -o results.parquet", "kvreplay export out -o selections.h5"),
    )
    add = found.add_argument
    add("run", metavar="RUN", type=Path, help="folder of results of kvreplay replay")
    add("-o", "--output", metavar="FILE", type=Path, required=True,
        help="file to write: .parquet or .arrow (typed columns; needs pyarrow), .csv, or .h5 (kept sets)")  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> int:
    """Writes the file; returns the exit code."""
    return exit_code("export", lambda: export(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
