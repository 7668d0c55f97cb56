"""`kvreplay regret TRACE... -p POLICY,… -b BUDGET,…`: what keeps policies from the best that could be kept."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.errors import Error, Refusal
from kvreplay.program import Parser, exit_code, names, not_installed

if TYPE_CHECKING:
    import pandas as pd


def parser() -> Parser:
    """The command line, said once."""
    found = Parser(
        prog="kvreplay regret",
        description="How far the attention recall of policies stays below the best that could be kept, and why: "
        "by what their scores do not know (score), by chunks (structure), and by how the slots are divided over the "
        "heads of a layer (head) and over the layers (layer). Numbers are open loop: queries as captured under the "
        "full cache.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("traces", metavar="TRACE", type=Path, nargs="+", help="what is replayed")
    add("-p", "--policy", metavar="POLICY,…", action="append", required=True, help="as in kvreplay replay")
    add("-b", "--budget", metavar="BUDGET,…", action="extend", type=names, required=True,
        help="fractions of the prompt, or counts of tokens")  # fmt: skip
    add("--eval", metavar="QUERIES", help="as in kvreplay replay")
    add("-o", "--output", metavar="FILE.csv", type=Path, help="one line a trace in full precision, as CSV")
    add("--device", metavar="auto|cpu|cuda[:N]", help="as in kvreplay replay")
    add("--threads", metavar="N", help="as in kvreplay replay")
    add("--memory", metavar="SIZE", help="as in kvreplay replay")
    add("--json", action="store_true", help="one JSON document in place of the table")
    return found


def regret(arguments: argparse.Namespace) -> None:
    """Replays, subtracts, prints."""
    if arguments.output and arguments.output.suffix.lower() != ".csv":
        raise Error("-o", "format", "a name ending in .csv", str(arguments.output), Refusal.USAGE)
    try:
        from kvreplay.bounds import table
        from kvreplay.regret_terms import regret as terms_of
    except ModuleNotFoundError as missing:
        raise not_installed("regret", missing) from missing

    options = {name: getattr(arguments, name) for name in ("eval", "device", "threads", "memory")}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = terms_of(arguments.traces, arguments.policy, arguments.budget, **options)
    if arguments.output:
        write(found, arguments.output)
    print(json.dumps(table.document(found), indent=2, allow_nan=False) if arguments.json else table.table(found))
    for note in dict.fromkeys(str(one.message) for one in heard):
        print(f"kvreplay: regret: {note}", file=sys.stderr)


def write(found: pd.DataFrame, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.to_csv(path, index=False, float_format="%.17g", lineterminator="\n")
    except OSError as problem:
        raise Error(str(path), "cannot be written", "", str(problem.strerror)) from problem


def main(argv: list[str] | None = None) -> int:
    """Prints the terms; returns the exit code."""
    return exit_code("regret", lambda: regret(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
