"""`kvreplay predict RUN...`: rank correlation of offline metrics with the live model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvreplay.program import (
    Parser,
    add_same_prompt,
    exit_code,
    names,
    pattern,
    require_format,
    require_least,
    say_notes,
)
from kvreplay.run_folder import require_run, without_live


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay predict",
        description="Rank correlation of offline metrics with live ones, over the policies of one prompt at one "
        "budget: mean over prompts and its 95 % interval (Student's t). Needs runs measured by kvreplay live.",
        examples=(
            "kvreplay predict out",
            "kvreplay predict out --live nll_increase --data predict.csv -o predict.svg",
        ),
    )
    add = found.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="folders of results of kvreplay replay and kvreplay live")
    add = found.add_argument_group("correlation").add_argument
    add("--metric", metavar="NAME[:VARIANT],…", action="extend", type=names, default=[],
        help="offline metrics (default: all that the runs have)")  # fmt: skip
    add("--live", metavar="NAME[:VARIANT]", default="kld", help="live metric of tables and figure (default: kld)")
    add_same_prompt(add)
    add("--kind", metavar="REGEX", type=partial(pattern, "--kind"), help="part of a trace's name that is the kind of "
        "its prompt, such as the task (default: the name up to the first digit, hyphen or underscore)")  # fmt: skip
    add("--seed", metavar="N", type=int, default=0, help="random seed of the number of prompts needed (default: 0)")
    add = found.add_argument_group("results").add_argument
    add("--json", action="store_true", help="print JSON in place of the tables")
    add("--data", metavar="FILE.csv", type=Path, help="CSV file of the rank correlations with all live metrics")
    add("-o", "--output", metavar="FIGURE", type=Path, help="figure to write: .svg, .pdf or .png (default: none)")
    return found


def predict(arguments: argparse.Namespace) -> None:
    """Reads, correlates, prints."""
    require_format("--data", arguments.data, ".csv")
    require_format("-o", arguments.output, ".svg", ".pdf", ".png")
    require_least(arguments, seed=0)
    for folder in arguments.runs:
        require_run(folder)
    if not any((folder / "live.csv").exists() for folder in arguments.runs):
        raise without_live(arguments.runs)

    from kvreplay.predict.prediction import Prediction
    from kvreplay.predict.presentation import Presentation
    from kvreplay.results import Run
    from kvreplay.tables import write_csv

    runs = [Run(folder) for folder in arguments.runs]
    found = Prediction.of(runs, arguments.metric, arguments.same_prompt, arguments.kind, arguments.seed)
    shown = Presentation(found, arguments.live)
    if arguments.data:
        write_csv(found.headline, arguments.data)
    if arguments.output:
        from kvreplay.plot.style import save, settings

        with settings():
            save(shown.figure(), arguments.output)
    print(json.dumps(shown.document(), indent=2, allow_nan=False) if arguments.json else shown.text())
    say_notes("predict", found.notes, arguments.quiet)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the results; returns the exit code."""
    return exit_code("predict", lambda: predict(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
