"""`kvreplay why TRACE -p POLICY -t TOKEN`: why a policy keeps or evicts a token, and which query attends to it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreplay.errors import Error, Refusal
from kvreplay.program import (
    OF_RATIO,
    Parser,
    add_replay_options,
    budget_of_ratio,
    exit_code,
    require_least,
    require_paths,
)
from kvreplay.run_names import not_a_trace

if TYPE_CHECKING:
    import numpy as np

    from kvreplay.kept_rows import Decision
    from kvreplay.trace import Trace

LONGEST = 14  # characters of a token's text in the table


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay why",
        description="Explains why a policy keeps or evicts one token of the prompt: its score, its rank, the score at "
        "the cut, the token at the other side of the cut, and the later query that attends to it most.",
        examples=(
            "kvreplay why trace.h5 -p snapkv -t 1713 --layer 12",
            "kvreplay why trace.h5 -p h2o -b 512 -t 90 --json",
        ),
    )
    add = found.add_argument
    add("trace", metavar="TRACE", type=Path, help="trace to replay")
    add = found.add_argument_group("question").add_argument
    add("-p", "--policy", metavar="POLICY", required=True, help="policy, as in kvreplay replay")
    add(
        "-t", "--token", metavar="POSITION", type=int, required=True, help="position of the token in the prompt, from 0"
    )
    add("--layer", metavar="N", type=int, help="the model's number of the layer (default: every treated layer)")
    size = found.add_mutually_exclusive_group()
    size.add_argument("-b", "--budget", metavar="BUDGET", default="0.1",
        help="fraction of the prompt, or number of tokens (default: 0.1)")  # fmt: skip
    size.add_argument("--compression-ratio", metavar="RATIO", dest="budget", type=budget_of_ratio, help=OF_RATIO)
    add = found.add_argument_group("results").add_argument
    add("--json", action="store_true", help="print JSON in place of the table")
    add_replay_options(found.add_argument_group("execution").add_argument)
    return found


def why(arguments: argparse.Namespace) -> None:
    """Replays, explains, prints."""
    require_least(arguments, token=0, layer=0)
    require_paths(arguments.trace)
    if arguments.trace.is_dir():
        raise not_a_trace(arguments.trace)

    from kvreplay.engine import Trace, require_cell

    require_cell(arguments.policy, arguments.budget)
    trace = Trace(arguments.trace)
    if arguments.token >= trace.prompt:
        raise Error("--token", "position", f"0 to {trace.prompt - 1}", str(arguments.token), Refusal.USAGE)

    from kvreplay.kept_rows import decision

    options = {name: getattr(arguments, name) for name in ("device", "threads", "memory")}
    found = decision(trace, arguments.policy, arguments.budget, **options)
    numbers = found.selection.numbers.tolist()
    if arguments.layer is not None and arguments.layer not in numbers:
        expected = f"a treated layer: {numbers[0]} to {numbers[-1]}"
        raise Error("--layer", "layer", expected, str(arguments.layer), Refusal.USAGE)
    layers = range(len(numbers)) if arguments.layer is None else [numbers.index(arguments.layer)]
    answers = [one for layer in layers for one in of_layer(trace, found, layer, arguments.token)]
    if arguments.json:
        about = {"policy": arguments.policy, "budget_tokens": found.budget, **token_of(trace, arguments.token)}
        print(json.dumps(about | {"rows": answers}, indent=2, allow_nan=False))
    else:
        print(table(trace, found, arguments, answers))


def token_of(trace: Trace, position: int) -> dict[str, Any]:
    """Position, text and spans of a token; the text is None if the trace has none."""
    text = trace.text
    begin, end = trace.offsets[position] if text else (0, 0)
    spans = [span.name for span in trace.spans if span.begin <= position < span.end]
    return {"position": int(position), "text": text[begin:end] if text else None, "spans": spans}


def later_attention(trace: Trace, layer: int, token: int) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each query after the prompt to a token, under the full cache: the positions [n] of the queries, and
    float [n,Hq]. The trace may lack such queries."""
    import numpy as np

    from kvreplay.trace_copies import altered

    stored = trace.query_positions(layer)
    queries = stored[stored >= trace.prompt] if len(stored) else np.arange(trace.prompt, trace.tokens)
    if not len(queries):
        return queries, np.zeros((0, trace.query_heads))
    # A view shows attention to prompt tokens alone, so all tokens become the prompt.
    view = altered(trace, layers=[layer], prompt=trace.tokens, spans=()).layer(0, eval="last:1")
    return queries, np.array([view.window_attention(1, int(query) + 1)[:, token] for query in queries])


def of_layer(trace: Trace, decision: Decision, layer: int, token: int) -> list[dict[str, Any]]:
    """One record a row of a treated layer."""
    import numpy as np

    selection = decision.selection
    queries, attention = later_attention(trace, int(selection.layers[layer]), token)
    rows = decision.rows[layer]
    group = attention.shape[1] // len(rows)
    found = []
    for row, kept in enumerate(rows):
        is_kept = bool(np.isin(token, kept))
        record: dict[str, Any] = {
            "layer": int(selection.numbers[layer]),
            "head": row,
            "kept": is_kept,
            "protected": decision.is_protected(layer, row, token),
            "kept_tokens": len(kept),
            "score": None, "rank": None, "cut": decision.cut(layer, row), "rival": None, "evicted_at": None,
            "later_attention": None, "query": None, "query_head": None, "query_attention": None,
        }  # fmt: skip
        if selection.evicted_at is not None:
            when = int(selection.evicted_at[selection.layers[layer], row, token])
            record["evicted_at"] = when if when >= 0 else None
        if decision.scores is not None and not record["protected"]:
            ranked = decision.ranked(layer, row)
            record["score"] = float(decision.scores[layer, row, token])
            record["rank"] = 1 + int(np.flatnonzero(ranked == token)[0])
            if record["cut"] is not None:
                others = ranked[~np.isin(ranked, kept)] if is_kept else ranked[np.isin(ranked, kept)][::-1]
                record["rival"] = int(others[0]) if len(others) else None
        own = attention[:, row * group : (row + 1) * group]
        if own.size:
            query, head = np.unravel_index(own.argmax(), own.shape)
            record |= {
                "later_attention": float(own.mean()),
                "query": int(queries[query]),
                "query_head": int(row * group + head),
                "query_attention": float(own[query, head]),
            }
        found.append(record)
    return found


def table(trace: Trace, decision: Decision, arguments: argparse.Namespace, answers: list[dict[str, Any]]) -> str:
    """One line a row, and how to read it."""
    from kvreplay.tables import aligned, wrapped

    def shown(position: int | None) -> str:
        text = None if position is None else token_of(trace, position)["text"]
        return "-" if position is None else f"{position}" + ("" if text is None else f" {json.dumps(text)[:LONGEST]}")

    token = token_of(trace, arguments.token)
    spans = f", in {', '.join(token['spans'])}" if token["spans"] else ""
    head = (
        f"token {shown(arguments.token)}{spans}: {arguments.policy} at {decision.budget} tokens a row        OPEN LOOP"
    )
    rows = f"{len(answers)} row{'s' * (len(answers) > 1)} (layers x heads)"
    kept = sum(one["kept"] for one in answers)
    protected = sum(one["protected"] for one in answers)
    head += f"\nkept in {kept} of {rows}" + (f", protected in {protected}" if protected else "")
    lines = [("layer", "head", "kept", "score", "rank", "cut", "rival", "most attended by", "weight")]
    for one in answers:
        state = "protected" if one["protected"] else "kept" if one["kept"] else "evicted"
        if one["evicted_at"] is not None:
            state += f" at {one['evicted_at']}"
        query = "-" if one["query"] is None else f"{shown(one['query'])}, head {one['query_head']}"
        lines.append((str(one["layer"]), str(one["head"]), state, number(one["score"]),
                      "-" if one["rank"] is None else str(one["rank"]), number(one["cut"]), shown(one["rival"]), query,
                      number(one["query_attention"])))  # fmt: skip
    notes = [
        "cut: lowest score of a kept token outside the protected ones. rival: for an evicted token, the kept token "
        "with this score; for a kept one, the evicted token with the highest score.",
        "most attended by: the query after the prompt with the largest attention to the token under the full cache.",
    ]
    if all(one["cut"] is None for one in answers):
        notes[0] = (
            "No cut: the policy does not keep the tokens with the highest scores, but whole chunks, or it selects "
        )
        notes[0] += "by position, or repeatedly."
    return "\n".join([head, "", *aligned(lines, words=9), "", *(line for note in notes for line in wrapped(note))])


def number(value: float | None) -> str:
    """Rounded; a dash for an undefined value."""
    return "-" if value is None else f"{value:.5g}"


def main(argv: list[str] | None = None) -> int:
    """Prints the explanation; returns the exit code."""
    return exit_code("why", lambda: why(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
