"""`kvreplay predict RUN...`: which offline metric has policies in the order that the live model has them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvreplay.errors import Error, Refusal
from kvreplay.program import Parser, exit_code, names, not_installed


def parser() -> Parser:
    """The command line, said once."""
    found = Parser(
        prog="kvreplay predict",
        description="Rank correlation of offline metrics with live ones, over the policies of one prompt at one "
        "budget: mean over prompts and its 95 % bootstrap interval. Takes runs that `kvreplay live` has measured.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("runs", metavar="RUN", type=Path, nargs="+", help="folders that `kvreplay replay` and `kvreplay live` wrote")
    add("--metric", metavar="NAME[:VARIANT],…", action="extend", type=names, default=[],
        help="offline metrics (default: all that the runs have)")  # fmt: skip
    add("--live", metavar="NAME[:VARIANT]", default="kld", help="the live metric of tables and figure (default: kld)")
    add("--same-prompt", metavar="REGEX", default="", help="traces in whose names the first group (or all that "
        "matches) is equal have the same prompt (default: equal names, or equal token ids)")  # fmt: skip
    add("--kind", metavar="REGEX", default="", help="what of a trace's name is the kind of its prompt (default: what "
        "comes before the first digit, hyphen or underscore)")  # fmt: skip
    add("--seed", metavar="N", type=int, default=0, help="of all random draws (default: 0)")
    add("--json", action="store_true", help="one JSON document in place of the tables")
    add("--data", metavar="FILE.csv", type=Path, help="the headline of all live metrics in full precision, as CSV")
    add("-o", "--output", metavar="FIGURE", type=Path, help="the figure: .svg, .pdf or .png (default: none)")
    return found


def pattern(flag: str, text: str) -> re.Pattern[str] | None:
    """Of an option; None: not given."""
    try:
        return re.compile(text) if text else None
    except re.error as problem:
        raise Error(flag, "not a regular expression", str(problem), text, Refusal.USAGE) from problem


def predict(arguments: argparse.Namespace) -> None:
    """Reads, correlates, prints."""
    if arguments.data and arguments.data.suffix.lower() != ".csv":
        raise Error("--data", "format", "a name ending in .csv", str(arguments.data), Refusal.USAGE)
    if arguments.output and arguments.output.suffix.lower() not in (".svg", ".pdf", ".png"):
        raise Error("-o", "format", "a name ending in .svg, .pdf or .png", str(arguments.output), Refusal.USAGE)
    if arguments.seed < 0:
        raise Error("--seed", "out of range", "0 or more", str(arguments.seed), Refusal.USAGE)
    patterns = pattern("--same-prompt", arguments.same_prompt), pattern("--kind", arguments.kind)
    try:
        from kvreplay.predict.prediction import Prediction
        from kvreplay.predict.presentation import Presentation
        from kvreplay.results import Run
    except ModuleNotFoundError as missing:
        raise not_installed("predict", missing) from missing

    found = Prediction.of([Run(folder) for folder in arguments.runs], arguments.metric, *patterns, arguments.seed)
    shown = Presentation(found, arguments.live)
    if arguments.data:
        arguments.data.parent.mkdir(parents=True, exist_ok=True)
        found.headline.to_csv(arguments.data, index=False, float_format="%.17g", lineterminator="\n")
    if arguments.output:
        from kvreplay.plot.style import save, settings

        with settings():
            save(shown.figure(), arguments.output)
    print(json.dumps(shown.document(), indent=2, allow_nan=False) if arguments.json else shown.text())
    for note in found.notes:
        print(f"kvreplay: predict: {note}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was found; the value is the exit code."""
    return exit_code("predict", lambda: predict(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
