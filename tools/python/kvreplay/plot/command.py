"""`kvreplay plot KIND RUN`: a figure of a finished run, and the numbers in it."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from kvreplay.errors import Error, Refusal
from kvreplay.nearest import nearest
from kvreplay.program import Parser, exit_code, names, not_installed

KINDS = {
    "heatmap": "layer × layer Jaccard similarity of the kept tokens, beside chance",
    "kept": "which tokens are kept: layer × position, with the trace's spans",
    "redundancy": "similarity of keys and of values to their most similar other, by layer and position",
    "budgets": "kept tokens by layer",
    "curve": "a metric over the budget, a line a policy",
    "layers": "a metric by layer, a line a policy",
    "needle": "span recall of needles by prompt length and depth, over many traces",
    "compare": "paired differences of policies against a --baseline, over many traces",
    "attention": "attention of later queries over the prompt, and the tokens kept",
    "similarity": "token × token cosine of keys and of values in a layer; of a run or a TRACE.h5",
}
OF_TRACES = ("similarity",)  # kinds that need no run
FORMATS = ("svg", "pdf", "png")


def parser() -> Parser:
    """The command line, said once."""
    kinds = "\n".join(f"  {name:<11}{summary}" for name, summary in KINDS.items())
    found = Parser(
        prog="kvreplay plot",
        description="Draws a finished run. What a figure shows is open loop: queries as captured under the full cache.",
        epilog="kinds:\n" + kinds,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    add("kind", metavar="KIND", help="what to draw, see below")
    add("run", metavar="RUN", type=Path, help="folder that `kvreplay replay` wrote; for similarity also a TRACE.h5")
    add("-o", "--output", metavar="FIG.svg|pdf|png", type=Path, action="append", default=[],
        help="file to write, format by suffix; several: repeat (default: RUN/figures/KIND.svg)")  # fmt: skip
    add("--data", metavar="FILE.csv", type=Path, help="the numbers drawn, as CSV")
    add("-p", "--policies", metavar="POLICY,…", action="append", default=[],
        help="policies to draw, as tables call them (default: all that were asked for)")  # fmt: skip
    add("-b", "--budgets", metavar="BUDGET,…", action="extend", type=names, default=[],
        help="budgets as they were asked for (default: all; where a figure shows one, the smallest)")  # fmt: skip
    add("--trace", metavar="NAME", action="append", default=[],
        help="traces to draw, repeat for several (default: all; where a figure shows one, the first)")  # fmt: skip
    add("--metric", metavar="NAME[:VARIANT]", default="", help="for curve, layers and compare (default: "
        "attention_recall); for needle: span_recall:any|mean|full (default: mean)")  # fmt: skip
    add("--baseline", metavar="POLICY", default="", help="for compare: what the other policies are compared with")
    add("--seed", metavar="N", type=int, default=0, help="for compare: of the bootstrap's draws (default: 0)")
    add("--layer", metavar="N", type=int, help="for attention and similarity: the model's own number of the layer "
        "(default: the middle one)")  # fmt: skip
    add("--head", metavar="N", type=int, help="for attention: the query head (default: the mean over heads)")
    add("--of", choices=("keys", "values"), default="", help="for similarity (default: both)")
    add("--variant", choices=("first", "mean", "union"), default="mean",
        help="for heatmap: sets of the first head, head by head, or their union (default: mean)")  # fmt: skip
    add("--title", metavar="TEXT", default="", help="replaces the figure's first line")
    return found


def check_names(arguments: argparse.Namespace) -> None:
    """What can be refused before anything is read."""
    if arguments.kind not in KINDS:
        raise Error("plot", "no such figure", nearest(arguments.kind, KINDS), arguments.kind, Refusal.USAGE)
    for path in arguments.output:
        if path.suffix[1:].lower() not in FORMATS:
            wanted = "a name ending in ." + ", .".join(FORMATS)
            raise Error("-o", "format", wanted, str(path), Refusal.USAGE)
    if arguments.run.suffix == ".h5" and arguments.kind not in OF_TRACES:
        raise Error("plot", f"{arguments.kind} needs a run", "a folder that replay wrote", str(arguments.run),
                    Refusal.USAGE)  # fmt: skip
    if arguments.seed < 0:
        raise Error("--seed", "out of range", "0 or more", str(arguments.seed), Refusal.USAGE)
    if arguments.data and arguments.data.suffix.lower() != ".csv":
        raise Error("--data", "format", "a name ending in .csv", str(arguments.data), Refusal.USAGE)


def plot(arguments: argparse.Namespace) -> list[Path]:
    """Draws and writes; the files written."""
    check_names(arguments)
    try:
        from kvreplay.asked import split_policies
        from kvreplay.plot import style
        from kvreplay.plot.choice import Choice
        from kvreplay.plot.trace_file import TraceFile
        from kvreplay.results import Run

        kind = importlib.import_module(f"kvreplay.plot.{arguments.kind}")
    except ModuleNotFoundError as missing:
        raise not_installed("plot", missing) from missing

    choice = Choice(
        TraceFile(arguments.run) if arguments.run.suffix == ".h5" else Run(arguments.run),
        policies=split_policies(arguments.policies),
        budgets_asked=arguments.budgets,
        traces_asked=arguments.trace,
        metric_asked=arguments.metric,
        variant=arguments.variant,
        baseline=arguments.baseline,
        seed=arguments.seed,
        layer=arguments.layer,
        head=arguments.head,
        of=arguments.of,
        title=arguments.title,
    )
    written = arguments.output or [choice.run.figures / f"{arguments.kind}.svg"]
    with style.settings():
        drawing = kind.draw(choice)
        try:
            for path in written:
                style.save(drawing.figure, path)
            if arguments.data:
                arguments.data.parent.mkdir(parents=True, exist_ok=True)
                drawing.data.to_csv(arguments.data, index=False, float_format="%.17g", lineterminator="\n")
        except OSError as problem:
            where = str(problem.filename or arguments.run)
            raise Error(where, "cannot be written", "", str(problem.strerror)) from problem
    if choice.run.failed:
        choice.notes.append(f"{len(choice.run.failed)} failed cells are not drawn")
    for note in choice.notes:
        print(f"kvreplay: {arguments.kind}: {note}", file=sys.stderr)
    return [*written, *([arguments.data] if arguments.data else [])]


def main(argv: list[str] | None = None) -> int:
    """Prints the files written; returns the exit code."""

    def work() -> None:
        for path in plot(parser().parse_args(argv)):
            print(path)

    return exit_code("plot", work)


if __name__ == "__main__":
    sys.exit(main())
