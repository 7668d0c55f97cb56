"""`kvreplay regret TRACE... -p POLICY,… -b BUDGET,…`: the gap of policies to the best kept set, by cause."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

from kvreplay.program import (
    OF_RATIO,
    Parser,
    add_replay_options,
    budget_of_ratio,
    exit_code,
    names,
    require_format,
    say_notes,
)
from kvreplay.run_names import trace_path


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay regret",
        description="Splits the gap in attention recall between policies and the best kept set into four terms: the "
        "scores (score), whole chunks (structure), the allocation over the heads of a layer (head) and over the layers "
        "(layer). Numbers are open loop: queries as captured under the full cache.",
        examples=(
            "kvreplay regret trace.h5 -p snapkv,chunkkv -b 0.1",
            "kvreplay regret traces/*.h5 -p h2o -b 0.05,0.2 -o regret.csv",
        ),
    )
    add = found.add_argument
    add("traces", metavar="TRACE", type=trace_path, nargs="+", help="traces to replay")
    compared = found.add_argument_group("policies and budgets")
    add = compared.add_argument
    add("-p", "--policy", metavar="POLICY,…", action="append", required=True,
        help="policies, as in kvreplay replay; repeatable")  # fmt: skip
    size = compared.add_mutually_exclusive_group(required=True)
    size.add_argument("-b", "--budget", metavar="BUDGET,…", action="extend", type=names,
        help="fractions of the prompt, or numbers of tokens; repeatable")  # fmt: skip
    size.add_argument("--compression-ratio", metavar="RATIO,…", dest="budget", action="extend",
        type=lambda text: [budget_of_ratio(one) for one in names(text)], help=f"{OF_RATIO}; repeatable")  # fmt: skip
    add(
        "--eval",
        metavar="QUERIES",
        help="queries at which recall is measured, as in kvreplay replay (default: continuation)",
    )
    add = found.add_argument_group("results").add_argument
    add("-o", "--output", metavar="FILE.csv", type=Path, help="CSV file to write, one row per trace, full precision")
    add("--json", action="store_true", help="print JSON in place of the table")
    add_replay_options(found.add_argument_group("execution").add_argument)
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
    say_notes("regret", dict.fromkeys(str(one.message) for one in heard), arguments.quiet)


def main(argv: list[str] | None = None) -> int:
    """Prints the terms; returns the exit code."""
    return exit_code("regret", lambda: regret(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
