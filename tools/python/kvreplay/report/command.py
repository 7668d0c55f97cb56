"""`kvreplay report RUN`: one offline HTML file of a finished run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvreplay.program import Parser, exit_code, names, require_format, say_notes, say_step, writing
from kvreplay.run_folder import require_run
from kvreplay.run_names import check_names, split_policies


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay report",
        writes_files=True,
        description="Writes one offline HTML file of a finished run: table, curves, similarity of layers, budgets, and "
        "the text of the prompt shaded by the share of sets that keep a token. Token ranks need "
        "kvreplay replay --save scores.",
        examples=("kvreplay report out", "kvreplay report out -p snapkv,h2o -b 0.1 --no-text -o report.html"),
    )
    add = found.add_argument
    add("run", metavar="RUN", type=Path, help="folder of results of kvreplay replay")
    add("-o", "--output", metavar="REPORT.html", type=Path, help="file to write (default: RUN/report.html)")
    add("-p", "--policies", metavar="POLICY,…", action="append", default=[],
        help="policies to show, as the tables name them (default: all)")  # fmt: skip
    add("-b", "--budgets", metavar="BUDGET,…", action="extend", type=names, default=[],
        help="budgets to show, as given to replay (default: all)")  # fmt: skip
    add("--trace", metavar="NAME,…", action="extend", type=names, default=[],
        help="traces to show; repeatable (default: the first, or the first with live numbers)")  # fmt: skip
    add("--baseline", metavar="POLICY", default="",
        help="baseline of the comparison over traces (default: the first policy of the page)")  # fmt: skip
    add("--no-text", action="store_true", help="show positions in place of the text of the prompt")
    return found


def report(arguments: argparse.Namespace) -> Path:
    """Writes the page; the file written."""
    output = arguments.output or arguments.run / "report.html"
    require_format("-o", output, ".html", ".htm")
    require_run(arguments.run)
    policies = split_policies(arguments.policies)
    check_names([arguments.run], policies=policies, baseline=arguments.baseline, budgets=arguments.budgets,
                traces=arguments.trace)  # fmt: skip
    say_step("report", f"reading {arguments.run}", arguments.quiet)

    from kvreplay.report.content import Page
    from kvreplay.report.page import written
    from kvreplay.results import Run

    text = not arguments.no_text
    page = Page(Run(arguments.run), arguments.trace, policies, arguments.budgets, text, arguments.baseline)
    with writing(output):
        output.write_bytes(written(page))
    say_notes("report", [*page.notes, f"{output.stat().st_size:,} bytes"], arguments.quiet)
    return output


def main(argv: list[str] | None = None) -> int:
    """Prints the file written; returns the exit code."""
    return exit_code("report", lambda: print(report(parser().parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
