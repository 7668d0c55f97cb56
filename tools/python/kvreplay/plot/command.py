"""`kvreplay plot KIND RUN`: a figure of a finished run, and the numbers in it."""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreplay.errors import Error, Refusal
from kvreplay.headline import DEFAULT
from kvreplay.nearest import nearest
from kvreplay.program import (
    Parser,
    exit_code,
    names,
    require_format,
    require_least,
    require_paths,
    say_notes,
    say_step,
)
from kvreplay.run_folder import require_run
from kvreplay.run_names import SELECT_SECONDS, check_names, metric_of_title, require_baseline, split_policies
from kvreplay.tables import wrapped

if TYPE_CHECKING:
    from kvreplay.plot.style import Drawing
    from kvreplay.plot.trace_file import TraceFile
    from kvreplay.results import Run
    from kvreplay.trace import Trace


@dataclass(frozen=True)
class Kind:
    """The content of a figure, and the options that it reads beside those of every figure: fields of `Choice`."""

    summary: str
    reads: tuple[str, ...]


OF_SETS = ("policies", "budgets_asked", "traces_asked")
KINDS = {
    "heatmap": Kind("layer × layer Jaccard similarity of the kept tokens, with the value expected by "
                    "chance", (*OF_SETS, "variant")),
    "kept": Kind("kept tokens, layer × position, with the spans of the trace", OF_SETS),
    "redundancy": Kind("highest cosine similarity of each key and value to another token, by layer and position",
                       ("traces_asked",)),
    "budgets": Kind("kept tokens per layer", OF_SETS),
    "curve": Kind("a metric over the budget, one line per policy", (*OF_SETS, "metric_asked")),
    "tradeoff": Kind("a metric over the memory of the cache, one line per policy and store, with the Pareto "
                     "front", (*OF_SETS, "metric_asked")),
    "layers": Kind("a metric by layer, one line per policy", (*OF_SETS, "metric_asked")),
    "needle": Kind("span recall of needles by prompt length and depth, over many traces", (*OF_SETS, "metric_asked")),
    "compare": Kind("paired differences between policies and a --baseline, over many traces",
                    (*OF_SETS, "metric_asked", "baseline", "seed")),
    "attention": Kind("attention of evaluation queries to the prompt, and the kept tokens",
                      (*OF_SETS, "layer", "head")),
    "similarity": Kind("token × token cosine similarity of keys and values in a layer; of a run or a TRACE.h5",
                       ("traces_asked", "layer", "of")),
}  # fmt: skip
OTHER_NAMES = {"pareto": "tradeoff"}  # of kinds
OF_TRACES = ("similarity",)  # kinds that need no run
NARROWEST, WIDEST = 2.5, 20.0  # inches of a figure
PAPER_WIDTHS = {"column": 3.25, "text": 6.75}  # inches, of a paper in two columns, as ICML sets them
UNITS_OF_INCH = {"in": 1.0, "cm": 2.54, "mm": 25.4}
FORMATS = (".svg", ".pdf", ".png", ".pgf")


def parser() -> Parser:
    """The parser of the command line. An option that only some kinds read sets a field of `Choice` if it is given."""
    found = Parser(
        prog="kvreplay plot",
        usage="kvreplay plot KIND RUN [options]",
        writes_files=True,
        description="\n".join(
            wrapped("Draws figures of a finished run. Numbers are open loop: queries as captured under the full cache.")
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        examples=(
            "kvreplay plot curve out --metric attention_recall",
            "kvreplay plot heatmap out -p snapkv -b 0.1 -o heatmap.pdf --data heatmap.csv",
        ),
    )
    add = found.add_argument
    add("kind", metavar="KIND", type=lambda text: OTHER_NAMES.get(text, text), help="kind of figure, see below")
    add(
        "run",
        metavar="RUN",
        type=Path,
        nargs="?",
        help="folder of results of kvreplay replay; for similarity also a TRACE.h5",
    )
    add = found.add_argument_group("results").add_argument
    add("-o", "--output", metavar="FIG.svg|pdf|png|pgf", type=Path, action="append", default=[],
        help="file to write, in the format of its suffix; repeatable (default: "
        "RUN/figures/KIND.svg, with --metric KIND-METRIC.svg)")  # fmt: skip
    add("--data", metavar="FILE.csv", type=Path, help="CSV file of the numbers in the figure")
    add("--title", metavar="TEXT", default="", help="title (default: that of the kind; none with --style paper)")
    add("--style", choices=("screen", "paper"), default="screen",
        help="paper: text of 8 pt, no title, and no caption, which is printed instead (default: screen)")  # fmt: skip
    add("--width", metavar="column|text|INCHES", type=page_width, help="width of the figure in inches, or with a unit, "
        "as in 83mm or 8.3cm; column: 3.25, text: 6.75 (default: as the panels need; with --style paper column, or "
        "text if the figure would be taller than 8)")  # fmt: skip

    of_kinds = partial(found.add_argument_group("selection").add_argument, default=argparse.SUPPRESS)
    of_kinds("-p", "--policies", metavar="POLICY,…", action="append",
             help="policies to draw, in this order, as the tables name them (default: all, sorted)")  # fmt: skip
    of_kinds("-b", "--budgets", dest="budgets_asked", metavar="BUDGET,…", action="extend", type=names,
             help="budgets, as given to replay (default: all; in a figure of one budget, the smallest)")  # fmt: skip
    of_kinds("--trace", dest="traces_asked", metavar="NAME,…", action="extend", type=names,
             help="traces to draw; repeatable (default: all; in a figure of one trace, the first)")  # fmt: skip
    of_kinds("--metric", dest="metric_asked", metavar="NAME[:VARIANT]",
             help=f"metric to draw, as kvreplay replay --metrics names it (default: {DEFAULT}; "
             "needle: span_recall:mean, also :any and :full)")  # fmt: skip
    of_kinds("--variant", choices=("first", "mean", "union"),
             help="sets of the first head, mean over heads, or union of heads (default: mean)")  # fmt: skip
    of_kinds("--baseline", metavar="POLICY", help="policy to compare with")
    of_kinds("--seed", metavar="N", type=int, help="random seed of the sign flips (default: 0)")
    of_kinds("--layer", metavar="N", type=int, help="layer number in the model (default: the middle layer)")
    of_kinds("--head", metavar="N", type=int, help="query head (default: the mean over heads)")
    of_kinds("--of", choices=("keys", "values"), help="vectors to compare (default: both)")
    found.epilog = "kinds of figure, with the selection options that they accept:\n" + "\n".join(
        line
        for name, kind in KINDS.items()
        for text in (f"  {name:<11}{kind.summary}", f"{'':13}{' '.join(map(found.flag, kind.reads))}")
        for line in wrapped(text, " " * 13)
    )
    return found


def page_width(text: str) -> float:
    """The inches of --width."""
    number, unit = re.fullmatch(r"(.*?)(in|cm|mm)?", text, re.DOTALL).groups()
    try:
        width = PAPER_WIDTHS[text] if text in PAPER_WIDTHS else float(number) / UNITS_OF_INCH[unit or "in"]
    except ValueError:
        width = math.nan
    if not NARROWEST <= width <= WIDEST:
        raise argparse.ArgumentTypeError(
            f"expected column, text or {NARROWEST:g} to {WIDEST:g} inches, as in 3.25, 83mm or 8.3cm, found {text}"
        )  # fmt: skip
    return width


def asked_of_kinds(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Choice` that were given and that only some kinds read."""
    of_some = {field for kind in KINDS.values() for field in kind.reads}
    return {field: value for field, value in vars(arguments).items() if field in of_some}


def check_kind(arguments: argparse.Namespace) -> None:
    """Rejects an unknown kind of figure, and options that its kind does not read."""
    if arguments.kind not in KINDS:
        word = arguments.kind.lower()
        kinds = [name for name, kind in KINDS.items() if word in kind.summary.lower()]  # heatmap shows the Jaccard
        expected = nearest(kinds[0] if len(kinds) == 1 else word, KINDS, "kvreplay plot --help")
        if str(arguments.run) in KINDS:
            expected = f"kvreplay plot {arguments.run} {arguments.kind}"
            raise Error("plot", "the kind of figure comes before RUN", expected, "", Refusal.USAGE)
        if arguments.run is None and Path(arguments.kind).exists():
            raise Error("plot", "no kind of figure before RUN", "one of " + ", ".join(KINDS), "", Refusal.USAGE)
        raise Error("plot", "unknown kind of figure", expected, arguments.kind, Refusal.USAGE)
    if arguments.run is None:
        raise Error("plot", "no RUN", f"kvreplay plot {arguments.kind} RUN", "", Refusal.USAGE)
    for field in asked_of_kinds(arguments):
        readers = [name for name, kind in KINDS.items() if field in kind.reads]
        if arguments.kind not in readers:
            wanted = ("one of " if len(readers) > 1 else "") + ", ".join(readers)
            raise Error(parser().flag(field), "not an option of this figure", wanted, arguments.kind, Refusal.USAGE)
    require_least(arguments, seed=0)


def require_kind_of_traces(kind: str, path: Path) -> None:
    """Rejects a trace where the figure needs a run."""
    if kind not in OF_TRACES:
        expected = "a folder of results of kvreplay replay"
        raise Error("plot", f"{kind} needs a run", expected, str(path), Refusal.USAGE)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Rejects invalid options and missing files before any package that draws is imported."""
    check_kind(arguments)
    for path in arguments.output:
        require_format("-o", path, *FORMATS)
    if arguments.run.suffix == ".h5":
        require_kind_of_traces(arguments.kind, arguments.run)
    require_format("--data", arguments.data, ".csv")
    if arguments.run.suffix == ".h5":
        require_paths(arguments.run)
        return
    require_run(arguments.run)
    asked = asked_of_kinds(arguments)
    if arguments.kind == "compare":
        require_baseline(asked.get("baseline", ""), [arguments.run])
    metric = asked.get("metric_asked", "")
    # The metrics of needle are variants of span_recall; times are not in results.csv.
    is_checked_later = arguments.kind == "needle" or (metric and metric_of_title(metric) == SELECT_SECONDS)
    check_names(
        [arguments.run],
        policies=split_policies(asked.get("policies", ())),
        baseline=asked.get("baseline", ""),
        budgets=asked.get("budgets_asked", ()),
        traces=asked.get("traces_asked", ()),
        metrics=[metric] if metric and not is_checked_later else (),
    )


def drawn(arguments: argparse.Namespace, source: Run | TraceFile) -> Drawing:
    """The figure of the arguments."""
    from kvreplay.plot import style
    from kvreplay.plot.figure_options import Choice

    kind = importlib.import_module(f"kvreplay.plot.{arguments.kind}")
    asked = asked_of_kinds(arguments)
    if "policies" in asked:
        asked["policies"] = split_policies(asked["policies"])
    paper = arguments.style == "paper"
    widths = PAPER_WIDTHS.values() if paper and not arguments.width else [arguments.width]
    for width in widths:
        choice = Choice(source, title=arguments.title, paper=paper, page_width=width, **asked)
        with style.settings():
            drawing = kind.draw(choice)
        height = drawing.figure.get_figheight()
        if height <= style.TALLEST:
            break
    notes = [*choice.notes]
    if paper and height > style.TALLEST:
        notes.append(f"{height:.1f} inches tall, a page has {style.TALLEST:g}; use -p to draw fewer policies")
    if source.failed:
        notes.append(f"{len(source.failed)} failed cells are not drawn")
    return replace(drawing, notes=notes)


def plot(arguments: argparse.Namespace) -> list[Path]:
    """Draws and writes; the files written."""
    check_arguments(arguments)
    say_step(arguments.kind, f"drawing {arguments.run}", arguments.quiet)

    from kvreplay.plot.trace_file import TraceFile
    from kvreplay.results import Run
    from kvreplay.tables import wrapped, write_csv

    source = TraceFile(arguments.run) if arguments.run.suffix == ".h5" else Run(arguments.run)
    drawing = drawn(arguments, source)
    metric = asked_of_kinds(arguments).get("metric_asked", "")
    name = "-".join(filter(None, [arguments.kind, re.sub(r"[^\w.-]+", "-", metric)]))
    outputs = arguments.output or [source.figures / f"{name}.svg"]
    written = [file for path in outputs for file in drawing.save(path)]
    if arguments.data:
        write_csv(drawing.data, arguments.data)
    prefix = " " * len(f"kvreplay: {arguments.kind}: ")
    notes = [
        "\n".join(wrapped(prefix + note, "  ")).lstrip() if note.startswith("caption: ") else note
        for note in drawing.notes
    ]
    say_notes(arguments.kind, notes, arguments.quiet)
    return [*written, *([arguments.data] if arguments.data else [])]


def figure(kind: str, source: Run | Trace | str | Path, **options: Any) -> Drawing:
    """Draws a figure of a run, as `kvreplay plot KIND RUN` does, without writing files; `similarity` also of a trace.
    A path is that of a run's folder.

    `options`: long names of the command's selection options (policies, budgets, trace, metric, layer, head …), each
    with one value or several, `title`, `style` and `width`. The result is shown in notebooks. Its `figure` is
    matplotlib's, `data` has the numbers in it, `notes` what the command prints beside the figure, such as the caption
    of style="paper", and `save(path)` writes .svg, .pdf, .png or .pgf.

    Raises Error for invalid arguments, as the command does.
    """
    from kvreplay.plot.trace_file import TraceFile
    from kvreplay.results import Run
    from kvreplay.trace import Trace

    words = [kind, "SOURCE"]
    known = parser().long_names - {"output", "data", "help", "quiet", "version"}
    for name, value in options.items():
        if name not in known:
            raise Error("figure", "unknown option", nearest(name, known), name, Refusal.USAGE)
        for one in value if isinstance(value, list | tuple) else [value]:
            words += ["--" + name.replace("_", "-"), str(one)]
    arguments = parser().parse_args(words)
    check_kind(arguments)
    if isinstance(source, Trace):
        require_kind_of_traces(kind, source.path)
        if source.in_memory:
            raise Error("figure", "trace in memory", "a trace that was opened from a file", "", Refusal.USAGE)
        source = TraceFile(source.path)
    elif not isinstance(source, Run):
        source = Run(Path(source))
    return drawn(arguments, source)


def main(argv: list[str] | None = None) -> int:
    """Prints the files written; returns the exit code."""
    return exit_code("plot", lambda: print(*plot(parser().parse_args(argv)), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
