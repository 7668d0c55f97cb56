"""`kvreplay report RUN`: one offline HTML file of a finished run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvreplay.program import Parser, exit_code, names, require_format, say_notes, writing


def parser() -> Parser:
    """The command line, said once."""
    found = Parser(
        prog="kvreplay report",
        description="Writes one HTML file of a finished run, which needs no network: table, curves, similarity of "
        "layers, budgets, and the prompt's text shaded by who kept it. Ranks need `kvreplay replay --save scores`.",
    )
    add = found.add_argument
    add("run", metavar="RUN", type=Path, help="folder that `kvreplay replay` wrote")
    add("-o", "--output", metavar="REPORT.html", type=Path, help="file to write (default: RUN/report.html)")
    add("-p", "--policies", metavar="POLICY,…", action="append", default=[],
        help="policies to show, as tables call them (default: all)")  # fmt: skip
    add("-b", "--budgets", metavar="BUDGET,…", action="extend", type=names, default=[],
        help="budgets as they were asked for (default: all)")  # fmt: skip
    add("--trace", metavar="NAME", action="append", default=[],
        help="traces to show, repeat for several (default: the first)")  # fmt: skip
    add("--no-text", action="store_true", help="for private prompts: no text of the prompt, tokens as positions")
    return found


def report(arguments: argparse.Namespace) -> Path:
    """Writes the page; the file written."""
    output = arguments.output or arguments.run / "report.html"
    require_format("-o", output, ".html", ".htm")

    from kvreplay.report.content import Page
    from kvreplay.report.page import written
    from kvreplay.results import Run
    from kvreplay.run_names import split_policies

    policies = split_policies(arguments.policies)
    page = Page(Run(arguments.run), arguments.trace, policies, arguments.budgets, text=not arguments.no_text)
    with writing(output):
        output.write_bytes(written(page))
    say_notes("report", [*page.notes, f"{output.stat().st_size:,} bytes"])
    return output


def main(argv: list[str] | None = None) -> int:
    """Prints the file written; returns the exit code."""
    return exit_code("report", lambda: print(report(parser().parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
