"""`kvreplay check TRACE KEPT -p POLICY -b BUDGET`: does an engine keep the tokens that the policy keeps?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.conformance import KEPT_SUFFIXES
from kvreplay.errors import Error, Refusal
from kvreplay.program import (
    OF_RATIO,
    Parser,
    add_replay_options,
    budget_of_ratio,
    exit_code,
    require_format,
    require_paths,
)

if TYPE_CHECKING:
    from kvreplay.conformance.comparison import Comparison

MOST_HEADS = 12  # columns of the table; with more heads, the table has the lowest alone


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay check",
        description="Compares the kept positions of an inference engine with those of the same policy on the same "
        "trace: overlap per layer and head, the first difference and its likely cause. Exit code 0: equal, apart from "
        "legal ties; 1: different.",
        examples=(
            "kvreplay check trace.h5 kept.safetensors -p snapkv:window=32 -b 512",
            "kvreplay check trace.h5 kept.npz -p h2o --compression-ratio 0.5 --ties any --json",
        ),
    )
    add = found.add_argument
    add("trace", metavar="TRACE", type=Path, help="trace of the prompt")
    add("kept", metavar="KEPT", type=Path,
        help="safetensors or npz file with positions, int32 [layers, heads, slots], -1 padded")  # fmt: skip
    add = found.add_argument_group("policy and budget").add_argument
    add("-p", "--policy", metavar="POLICY", required=True, help="policy of the engine, as in kvreplay replay")
    size = found.add_mutually_exclusive_group(required=True)
    size.add_argument("-b", "--budget", metavar="BUDGET", help="fraction of the prompt, or number of tokens")
    size.add_argument("--compression-ratio", metavar="RATIO", dest="budget", type=budget_of_ratio, help=OF_RATIO)
    add = found.add_argument_group("comparison").add_argument
    add("--ties", choices=("lower", "any"), default="lower",
        help="order of exactly equal scores: the lower position is kept, or any (default: lower)")  # fmt: skip
    add("--tolerance", metavar="SHARE", type=float, default=1e-5,
        help="scores that differ by at most this share of the score at the cut are tied (default: 1e-5)")  # fmt: skip
    add = found.add_argument_group("results").add_argument
    add("--json", action="store_true", help="print JSON in place of the table")
    add("--data", metavar="FILE.csv", type=Path, help="CSV file with a line per layer and head")
    add_replay_options(found.add_argument_group("execution").add_argument)
    return found


def check(arguments: argparse.Namespace) -> int:
    """Replays, compares, prints; returns the exit code."""
    if not 0 <= arguments.tolerance < 1:
        raise Error("--tolerance", "out of range", "0 to 1", str(arguments.tolerance), Refusal.USAGE)
    require_format("KEPT", arguments.kept, *KEPT_SUFFIXES)
    require_format("--data", arguments.data, ".csv")
    require_paths(arguments.trace, arguments.kept)

    from kvreplay.engine import Trace, require_cell

    require_cell(arguments.policy, arguments.budget)

    from kvreplay.conformance.causes import Question, repeated
    from kvreplay.conformance.comparison import Comparison, rows_of
    from kvreplay.conformance.kept_file import read_kept
    from kvreplay.kept_rows import decision

    trace = Trace(arguments.trace)
    options = {name: getattr(arguments, name) for name in ("device", "threads", "memory")}
    ours = decision(trace, arguments.policy, arguments.budget, **options)
    rows = ours.rows
    width = max(map(len, rows), default=1)
    if any(len(layer) != width for layer in rows):
        raise Error(arguments.policy, "not supported", "the same number of kept sets in every layer", "several")
    numbers = ours.selection.numbers.tolist()
    kept = read_kept(arguments.kept, numbers, width, ours.selection.boundary)
    rows = repeated(rows, len(kept.rows[0]))
    question = Question(trace, arguments.policy, ours, rows, kept.rows, options)
    comparison = Comparison(question, arguments.tolerance, arguments.ties == "any")
    if arguments.data:
        import pandas as pd

        from kvreplay.tables import write_csv

        write_csv(pd.DataFrame(rows_of(comparison)), arguments.data)
    print(json.dumps(document(comparison), indent=2) if arguments.json else table(comparison))
    return 0 if comparison.is_equal else Refusal.NO


def document(comparison: Comparison) -> dict:
    """For JSON."""
    from kvreplay.conformance.comparison import rows_of

    numbers = comparison.question.ours.selection.numbers
    return {
        "equal": comparison.is_equal,
        "tied_rows": int(comparison.tied.sum()),
        "first_difference": comparison.first_difference() or None,
        "unsorted": [{"layer": int(numbers[layer]), "head": row} for layer, row in comparison.unsorted],
        "causes": [vars(cause) for cause in comparison.causes],
        "rows": rows_of(comparison),
    }


def table(comparison: Comparison) -> str:
    """The verdict; where sets differ, the overlap of the layers that differ, the first difference and the causes."""
    import numpy as np

    from kvreplay.tables import aligned

    question, overlap = comparison.question, comparison.overlap
    layers, heads = overlap.shape
    rows = f"{layers} layer{'s' * (layers > 1)}, {heads} set{'s' * (heads > 1)} a layer"
    tied = int(comparison.tied.sum())
    ties = f"; {tied} differ in tied tokens alone" if tied else ""
    place = f"{question.policy} at {question.ours.budget} tokens a row: {rows}"
    if comparison.is_equal:
        return f"equal: {place}{ties}"
    lines = [f"different: {place}; {len(comparison.different)} of {overlap.size} sets differ{ties}"]
    if comparison.different:
        differing = sorted({layer for layer, _ in comparison.different})
        few = heads <= MOST_HEADS
        header = ["layer", "mean", *(f"head {head}" for head in range(heads))] if few else ["layer", "mean", "lowest"]
        shown = [header]
        for layer in differing:
            values = overlap[layer] if few else [overlap[layer].min()]
            number = str(question.ours.selection.numbers[layer])
            shown.append([number, *(f"{one:.4f}" for one in (np.mean(overlap[layer]), *values))])
        lines += ["", "overlap (Jaccard) of the layers that differ", *aligned(shown, words=0)]
        lines += ["", f"first difference  {comparison.first_difference()}"]
    if comparison.unsorted:
        layer, row = comparison.unsorted[0]
        number = question.ours.selection.numbers[layer]
        lines += ["", f"not ascending     layer {number}, head {row}, and {len(comparison.unsorted) - 1} more rows"]
    for begin, cause in zip(["likely cause", *[""] * len(comparison.causes)], comparison.causes, strict=False):
        lines.append(f"{begin:<17} {cause.name}: {cause.text} ({cause.share:.1%} of the differing tokens)")
    if not comparison.causes:
        lines.append("likely cause      none of the tested ones explains half of the differing tokens")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns the exit code."""
    return exit_code("check", lambda: check(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
