"""`kvreplay compare RUN... --baseline POLICY`: are policies different over traces, and by how much?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvreplay.headline import DEFAULT
from kvreplay.program import Parser, add_same_prompt, exit_code, names, require_format, require_least, say_notes
from kvreplay.run_folder import require_run
from kvreplay.run_names import check_names, require_baseline, split_policies


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay compare",
        description="Compares policies with a baseline on the same traces at the same budgets: mean paired difference, "
        "its 95 % interval over prompts (Student's t), p-value of the sign-flip test, Holm-corrected over all printed "
        "lines. Offline metrics are open loop: queries as captured under the full cache.",
        examples=(
            "kvreplay compare out --baseline snapkv",
            "kvreplay compare out-1 out-2 --baseline h2o --metric attention_recall -b 0.1 --data compare.csv",
        ),
    )
    add = found.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="folders of results of kvreplay replay")
    add = found.add_argument_group("comparison").add_argument
    add("--baseline", metavar="POLICY", help="policy to compare with, as the tables name it (required)")
    add("--metric", metavar="NAME[:VARIANT],…", action="extend", type=names, default=[],
        help=f"metrics to compare (default: {DEFAULT}; and skill after replay --controls twins)")  # fmt: skip
    add("-p", "--policies", metavar="POLICY,…", action="append", default=[],
        help="policies to compare (default: all but the controls)")  # fmt: skip
    add("-b", "--budgets", metavar="BUDGET,…", action="extend", type=names, default=[],
        help="budgets, as given to replay (default: all)")  # fmt: skip
    add_same_prompt(add)
    add("--seed", metavar="N", type=int, default=0, help="random seed of the sign flips (default: 0)")
    add = found.add_argument_group("results").add_argument
    add("--json", action="store_true", help="print JSON in place of the table")
    add("--data", metavar="FILE.csv", type=Path, help="CSV file of the table in full precision")
    return found


def compare(arguments: argparse.Namespace) -> None:
    """Reads, compares, prints."""
    require_format("--data", arguments.data, ".csv")
    require_least(arguments, seed=0)
    for folder in arguments.runs:
        require_run(folder)
    require_baseline(arguments.baseline, arguments.runs)
    policies = split_policies(arguments.policies)
    check_names(arguments.runs, policies=policies, baseline=arguments.baseline, budgets=arguments.budgets,
                metrics=arguments.metric)  # fmt: skip

    from kvreplay.compare.comparison import Comparison
    from kvreplay.results import Run
    from kvreplay.tables import write_csv

    runs = [Run(folder) for folder in arguments.runs]
    comparison = Comparison(
        runs,
        baseline=arguments.baseline,
        policies=policies,
        budgets=arguments.budgets,
        metrics=arguments.metric,
        same_prompt=arguments.same_prompt,
        seed=arguments.seed,
    )
    if arguments.data:
        write_csv(comparison.lines, arguments.data)
    print(json.dumps(comparison.document(), indent=2, allow_nan=False) if arguments.json else comparison.table())
    failed = [f"{run.folder}: {len(run.failed)} failed cells are omitted" for run in runs if run.failed]
    say_notes("compare", [*failed, *comparison.notes], arguments.quiet)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns the exit code."""
    return exit_code("compare", lambda: compare(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
