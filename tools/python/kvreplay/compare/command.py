"""`kvreplay compare RUN... --baseline POLICY`: are policies different over traces, and by how much?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvreplay.headline import HEADLINE
from kvreplay.program import Parser, add_same_prompt, exit_code, names, require_format, require_least, say_notes


def parser() -> Parser:
    """The command line, said once."""
    found = Parser(
        prog="kvreplay compare",
        description="Compares policies with a baseline on the same traces at the same budgets: mean paired difference, "
        "its 95 % bootstrap interval over prompts, sign-flip p, Holm-corrected over all lines printed. Numbers are "
        "open loop: queries as captured under the full cache.",
    )
    add = found.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="folders that `kvreplay replay` wrote")
    add("--baseline", metavar="POLICY", required=True, help="what the others are compared with, as tables call it")
    add("--metric", metavar="NAME[:VARIANT],…", action="extend", type=names, default=[],
        help=f"metrics to compare (default: {HEADLINE}, and skill after replay --controls twins)")  # fmt: skip
    add("-p", "--policies", metavar="POLICY,…", action="append", default=[],
        help="policies to compare (default: all that were asked for)")  # fmt: skip
    add("-b", "--budgets", metavar="BUDGET,…", action="extend", type=names, default=[],
        help="budgets as they were asked for (default: all)")  # fmt: skip
    add_same_prompt(add)
    add("--seed", metavar="N", type=int, default=0, help="of all random draws (default: 0)")
    add("--json", action="store_true", help="one JSON document in place of the table")
    add("--data", metavar="FILE.csv", type=Path, help="the table in full precision, as CSV")
    return found


def compare(arguments: argparse.Namespace) -> None:
    """Reads, compares, prints."""
    require_format("--data", arguments.data, ".csv")
    require_least(arguments, seed=0)

    from kvreplay.compare.comparison import Comparison
    from kvreplay.results import Run
    from kvreplay.run_names import split_policies
    from kvreplay.tables import write_csv

    runs = [Run(folder) for folder in arguments.runs]
    comparison = Comparison(
        runs,
        baseline=arguments.baseline,
        policies=split_policies(arguments.policies),
        budgets=arguments.budgets,
        metrics=arguments.metric,
        same_prompt=arguments.same_prompt,
        seed=arguments.seed,
    )
    if arguments.data:
        write_csv(comparison.lines, arguments.data)
    print(json.dumps(comparison.document(), indent=2, allow_nan=False) if arguments.json else comparison.table())
    failed = [f"{run.folder}: {len(run.failed)} failed cells are left out" for run in runs if run.failed]
    say_notes("compare", [*failed, *comparison.notes])


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns the exit code."""
    return exit_code("compare", lambda: compare(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
