"""`kvreplay regret TRACE... -p POLICY,… -b BUDGET,…`: what keeps policies from the best that could be kept."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

from kvreplay.program import Parser, add_replay_options, exit_code, names, require_format, say_notes


def parser() -> Parser:
    """The command line, said once."""
    found = Parser(
        prog="kvreplay regret",
        description="How far the attention recall of policies stays below the best that could be kept, and why: "
        "by what their scores do not know (score), by chunks (structure), and by how the slots are divided over the "
        "heads of a layer (head) and over the layers (layer). Numbers are open loop: queries as captured under the "
        "full cache.",
    )
    add = found.add_argument
    add("traces", metavar="TRACE", type=Path, nargs="+", help="what is replayed")
    add("-p", "--policy", metavar="POLICY,…", action="append", required=True, help="as in kvreplay replay")
    add("-b", "--budget", metavar="BUDGET,…", action="extend", type=names, required=True,
        help="fractions of the prompt, or counts of tokens")  # fmt: skip
    add("--eval", metavar="QUERIES", help="as in kvreplay replay")
    add("-o", "--output", metavar="FILE.csv", type=Path, help="one line a trace in full precision, as CSV")
    add_replay_options(add)
    add("--json", action="store_true", help="one JSON document in place of the table")
    return found


def regret(arguments: argparse.Namespace) -> None:
    """Replays, subtracts, prints."""
    require_format("-o", arguments.output, ".csv")

    from kvreplay import regret_terms
    from kvreplay.tables import write_csv

    options = {name: getattr(arguments, name) for name in ("eval", "device", "threads", "memory")}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = regret_terms.regret(arguments.traces, arguments.policy, arguments.budget, **options)
    if arguments.output:
        write_csv(found, arguments.output)
    document = json.dumps(regret_terms.document(found), indent=2, allow_nan=False)
    print(document if arguments.json else regret_terms.table(found))
    say_notes("regret", dict.fromkeys(str(one.message) for one in heard))


def main(argv: list[str] | None = None) -> int:
    """Prints the terms; returns the exit code."""
    return exit_code("regret", lambda: regret(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
