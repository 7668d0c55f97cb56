"""`kvreplay compare RUN... --baseline POLICY`: are policies different over traces, and by how much?"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from kvreplay.errors import Error, Refusal
from kvreplay.headline import HEADLINE
from kvreplay.program import Parser, exit_code, names, not_installed


def parser() -> Parser:
    """The command line, said once."""
    found = Parser(
        prog="kvreplay compare",
        description="Compares policies with a baseline on the same traces at the same budgets: mean paired difference, "
        "its 95 % bootstrap interval over prompts, sign-flip p, Holm-corrected over all lines printed. Numbers are "
        "open loop: queries as captured under the full cache.",
        allow_abbrev=False,
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
    add("--same-prompt", metavar="REGEX", default="", help="traces in whose names the first group (or all that "
        "matches) is equal have the same prompt (default: equal names, or equal token ids)")  # fmt: skip
    add("--seed", metavar="N", type=int, default=0, help="of all random draws (default: 0)")
    add("--json", action="store_true", help="one JSON document in place of the table")
    add("--data", metavar="FILE.csv", type=Path, help="the table in full precision, as CSV")
    return found


def check_options(arguments: argparse.Namespace) -> re.Pattern[str] | None:
    """What can be refused before anything is read; the pattern of --same-prompt."""
    if arguments.data and arguments.data.suffix.lower() != ".csv":
        raise Error("--data", "format", "a name ending in .csv", str(arguments.data), Refusal.USAGE)
    if arguments.seed < 0:
        raise Error("--seed", "out of range", "0 or more", str(arguments.seed), Refusal.USAGE)
    try:
        return re.compile(arguments.same_prompt) if arguments.same_prompt else None
    except re.error as problem:
        raise Error("--same-prompt", "not a regular expression", str(problem), arguments.same_prompt,
                    Refusal.USAGE) from problem  # fmt: skip


def compare(arguments: argparse.Namespace) -> None:
    """Reads, compares, prints."""
    pattern = check_options(arguments)
    try:
        from kvreplay.compare.comparison import Comparison
        from kvreplay.results import Run
        from kvreplay.run_names import split_policies
    except ModuleNotFoundError as missing:
        raise not_installed("compare", missing) from missing

    runs = [Run(folder) for folder in arguments.runs]
    comparison = Comparison.of(
        runs,
        baseline=arguments.baseline,
        policies=split_policies(arguments.policies),
        budgets=arguments.budgets,
        metrics=arguments.metric,
        same_prompt=pattern,
        seed=arguments.seed,
    )
    if arguments.data:
        try:
            arguments.data.parent.mkdir(parents=True, exist_ok=True)
            comparison.lines.to_csv(arguments.data, index=False, float_format="%.17g", lineterminator="\n")
        except OSError as problem:
            raise Error(str(arguments.data), "cannot be written", "", str(problem.strerror)) from problem
    print(json.dumps(comparison.document(), indent=2, allow_nan=False) if arguments.json else comparison.table())
    failed = [f"{run.folder}: {len(run.failed)} failed cells are left out" for run in runs if run.failed]
    for note in [*failed, *comparison.notes]:
        print(f"kvreplay: compare: {note}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns the exit code."""
    return exit_code("compare", lambda: compare(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
