"""`kvreplay export RUN|TRACE... -o FILE|FOLDER`: results or metadata of traces as a table with types, kept sets as
HDF5, a card in Markdown, or all of it as a dataset of Hugging Face."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreplay.errors import DISK_FULL, Error, Refusal
from kvreplay.program import Parser, exit_code, require_format, require_paths, writing
from kvreplay.run_folder import require_run

if TYPE_CHECKING:
    from types import ModuleType

    import pyarrow as pa

    from kvreplay.results import Run

WHOLE = ("budget_tokens", "boundary", "n_queries")
REAL = ("kept_tokens", "value", "half_width")
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


def require_pyarrow(path: Path) -> ModuleType:
    """The package that writes `path`."""
    try:
        import pyarrow
    except ModuleNotFoundError as missing:
        what = path.suffix[1:].capitalize()
        raise Error(what, "not installed", "pip install pyarrow", str(missing), Refusal.CAPABILITY) from missing
    return pyarrow


def table_writer(path: Path, partial: Path, schema: pa.Schema) -> Any:
    """Writes tables into `partial`, in the format that the name of `path` says."""
    from pyarrow import ipc, parquet

    return (ipc.new_file if path.suffix.lower() == ".arrow" else parquet.ParquetWriter)(str(partial), schema)


def write_table(results: Path, path: Path) -> None:
    """Writes the rows of results.csv to `path`, whose name ends in .parquet or .arrow. Numbers are int64 or float64,
    truth values bool, seeds uint64, and everything else text. Empty numbers are null. Every float is the one that its
    digits denote. The memory is that of some thousand rows, whatever their number."""
    pa = require_pyarrow(path)
    from pyarrow import csv

    types = dict.fromkeys(WHOLE, pa.int64()) | dict.fromkeys(REAL, pa.float64()) | dict.fromkeys(TRUTH, pa.bool_())
    types["seed"] = pa.uint64()
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
            with table_writer(path, partial, rows.schema) as writer:
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


def write_facts(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the metadata of traces to `path`, whose name ends in .parquet or .arrow, one row a trace."""
    pa = require_pyarrow(path)
    from kvreplay.trace_card import schema

    table = pa.Table.from_pylist(list(rows), schema())
    with replacing(path) as partial, table_writer(path, partial, table.schema) as writer:
        writer.write_table(table)


def write_dataset(run: Run | None, rows: Sequence[dict[str, Any]], licence: str, folder: Path) -> None:
    """A folder that `datasets.load_dataset` reads: traces.parquet, results.parquet of a run, and the card."""
    from kvreplay.trace_card import card

    if folder.exists():
        raise Error(str(folder), "exists", "the name of a new folder", "a folder" if folder.is_dir() else "a file")
    with writing(folder / "README.md"):
        write_facts(rows, folder / "traces.parquet")
        if run:
            write_table(run.folder / "results.csv", folder / "results.parquet")
        names = ["traces", *(["results"] if run else [])]
        (folder / "README.md").write_text(card(rows, licence, names), encoding="utf-8")


def export(arguments: argparse.Namespace) -> None:
    """Writes the file in the format that its name says, or a folder."""
    inputs, path = arguments.inputs, arguments.output
    of_run = inputs[0].suffix.lower() != ".h5"
    suffixes = (".parquet", ".arrow", ".csv", ".h5", ".md") if of_run else (".parquet", ".arrow", ".md")
    if path.suffix:
        require_format("-o", path, *suffixes)
    if of_run and len(inputs) > 1:
        raise Error("RUN", "inputs", "one run, or traces (.h5)", str(len(inputs)), Refusal.USAGE)
    if of_run:
        require_run(inputs[0])
    else:
        require_paths(*inputs)

    run = None
    if of_run:
        from kvreplay.results import Run

        run = Run(inputs[0])
    match path.suffix.lower():
        case ".h5":
            write_selections(run, path)
        case ".csv":
            with replacing(path) as partial:
                shutil.copyfile(run.folder / "results.csv", partial)
        case ".parquet" | ".arrow" if run:
            write_table(run.folder / "results.csv", path)
        case suffix:
            from kvreplay.engine import Trace
            from kvreplay.trace_card import card, facts

            traces = [run.captured(name) for name in run.stored_traces] if run else inputs
            rows = [facts(Trace(trace), with_text=not arguments.no_text) for trace in traces]
            if suffix == ".md":
                with replacing(path) as partial:
                    partial.write_text(card(rows, arguments.licence), encoding="utf-8")
            elif suffix:
                write_facts(rows, path)
            else:
                write_dataset(run, rows, arguments.licence, path)
    print(path)


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay export",
        writes_files=True,
        description="Writes the numbers of a run as one table, its kept sets as one HDF5 file (selections.h5 of format "
        "1), the metadata of traces as one table or as a card in Markdown, or all of it as a dataset of Hugging Face.",
        examples=(
            "kvreplay export out -o results.parquet",
            "kvreplay export out -o selections.h5",
            "kvreplay export traces/*.h5 -o card.md --licence apache-2.0",
            "kvreplay export out -o dataset",
        ),
    )
    add = found.add_argument
    add("inputs", metavar="RUN|TRACE", type=Path, nargs="+",
        help="folder of results of kvreplay replay, or traces (.h5)")  # fmt: skip
    add("-o", "--output", metavar="FILE|FOLDER", type=Path, required=True,
        help="file to write: .parquet or .arrow (results of a run, or one row per trace; needs pyarrow), .csv "
             "(results), .h5 (kept sets), .md (card of the traces); without a suffix, a new folder that "
             "datasets.load_dataset reads")  # fmt: skip
    add(
        "--licence",
        metavar="NAME",
        default="",
        help="licence of the traces on the card, as apache-2.0 (default: not stated)",
    )
    add("--no-text", action="store_true", help="omit texts and token ids of traces")
    return found


def main(argv: list[str] | None = None) -> int:
    """Writes the file; returns the exit code."""
    return exit_code("export", lambda: export(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
