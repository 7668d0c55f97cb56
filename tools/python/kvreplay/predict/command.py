"""`kvreplay predict RUN...`: which offline metric has policies in the order that the live model has them."""

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


def parser() -> Parser:
    """The command line, said once."""
    found = Parser(
        prog="kvreplay predict",
        description="Rank correlation of offline metrics with live ones, over the policies of one prompt at one "
        "budget: mean over prompts and its 95 % bootstrap interval. Takes runs that `kvreplay live` has measured.",
    )
    add = found.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="folders that `kvreplay replay` and `kvreplay live` wrote")
    add("--metric", metavar="NAME[:VARIANT],…", action="extend", type=names, default=[],
        help="offline metrics (default: all that the runs have)")  # fmt: skip
    add("--live", metavar="NAME[:VARIANT]", default="kld", help="the live metric of tables and figure (default: kld)")
    add_same_prompt(add)
    add("--kind", metavar="REGEX", type=partial(pattern, "--kind"), help="what of a trace's name is the kind of its "
        "prompt (default: what comes before the first digit, hyphen or underscore)")  # fmt: skip
    add("--seed", metavar="N", type=int, default=0, help="of all random draws (default: 0)")
    add("--json", action="store_true", help="one JSON document in place of the tables")
    add("--data", metavar="FILE.csv", type=Path, help="the headline of all live metrics in full precision, as CSV")
    add("-o", "--output", metavar="FIGURE", type=Path, help="the figure: .svg, .pdf or .png (default: none)")
    return found


def predict(arguments: argparse.Namespace) -> None:
    """Reads, correlates, prints."""
    require_format("--data", arguments.data, ".csv")
    require_format("-o", arguments.output, ".svg", ".pdf", ".png")
    require_least(arguments, seed=0)

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
    say_notes("predict", found.notes)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was found; the value is the exit code."""
    return exit_code("predict", lambda: predict(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
