"""`kvreplay calibrate KIND TRACE... -o FILE`: calibration files of eviction methods, from traces."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvreplay.errors import Error, Refusal
from kvreplay.program import Parser, exit_code, require_paths, writing

FORMATS = {
    "tri-attention": (".pt",),
    "lu-kv": (".npy",),
    "duo-attention": (".tsv", ".npy"),
    "q-filters": ("", ".npy"),
    "head-kv": (".json", ".npy"),
    "expected-attention": ("",),
    "gate": (".parquet",),
}  # suffixes of the files; "": a folder


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay calibrate",
        description="Computes the calibration file of an eviction method from traces of one model. Statistics are over "
        "the prompts of all traces. Formats by the suffix of the output: the method's own, or .npy for the policy of "
        "kvreplay. docs/calibrate.md describes each file.",
        examples=(
            "kvreplay calibrate tri-attention *.h5 -o model.pt",
            "kvreplay calibrate q-filters *.h5 -o filters.npy",
            "kvreplay calibrate gate *.h5 -o gate.parquet",
        ),
        writes_files=True,
    )
    add = found.add_argument
    add("kind", metavar="KIND", choices=FORMATS, help=", ".join(FORMATS))
    add("traces", metavar="TRACE", type=Path, nargs="+", help="traces of one model")
    add("-o", "--output", metavar="FILE", type=Path, required=True,
        help="file to write; for q-filters and expected-attention a folder")  # fmt: skip
    add("--force", action="store_true", help="overwrite an existing file")
    return found


def calibrate(arguments: argparse.Namespace) -> None:
    """Reads, computes, writes."""
    kind, output = arguments.kind, arguments.output
    suffixes = FORMATS[kind]
    if output.suffix.lower() not in suffixes:
        expected = " or ".join(f"a name ending in {one}" if one else "a folder" for one in suffixes)
        raise Error("--output", f"unknown format of {kind}", expected, str(output), Refusal.USAGE)
    if output.exists() and not arguments.force:
        raise Error(str(output), "exists", "another name, or --force to overwrite", "a file")
    require_paths(*arguments.traces)

    from kvreplay.calibrate.files import WRITERS
    from kvreplay.calibrate.statistics import require_one_model
    from kvreplay.engine import Trace

    traces = [Trace(path) for path in arguments.traces]
    require_one_model(traces)
    with writing(output):
        WRITERS[kind](traces, output)
    print(output)


def main(argv: list[str] | None = None) -> int:
    """Writes the file; returns the exit code."""
    return exit_code("calibrate", lambda: calibrate(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
