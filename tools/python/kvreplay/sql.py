"""`kvreplay sql QUERY RUN`: queries over the results, kept sets, tokens, spans and attention of a run, by DuckDB."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.errors import Error, Refusal
from kvreplay.export import REAL, TRUTH, WHOLE
from kvreplay.program import Parser, exit_code, require_format
from kvreplay.run_folder import require_run

if TYPE_CHECKING:
    import pandas as pd

    from kvreplay.results import Run

EPSILON = 1e-3  # least attention that the table of attention contains, by default


def parser() -> Parser:
    """The parser of the command line."""
    found = Parser(
        prog="kvreplay sql",
        description="Runs an SQL query (DuckDB) over a run. Tables: results, cells, kept (kept tokens), tokens, spans, "
        "attention (of the eval queries to prompt tokens). docs/questions.md lists their columns.",
        examples=(
            'kvreplay sql "select label, count(*) from kept join cells using (trace, cell) group by all" out',
            'kvreplay sql "from attention order by attention desc limit 5" out --epsilon 0.01 --json',
        ),
    )
    add = found.add_argument
    add("query", metavar="QUERY", help="SQL query, as one argument")
    add("run", metavar="RUN", type=Path, help="folder of results of kvreplay replay")
    add("--epsilon", metavar="SHARE", type=float, default=EPSILON,
        help=f"least attention in the table attention (default: {EPSILON})")  # fmt: skip
    add("--json", action="store_true", help="print JSON in place of the table")
    add("--data", metavar="FILE.csv", type=Path, help="CSV file with the rows in full precision")
    return found


def cells(run: Run) -> pd.DataFrame:
    """One row a cell, with its policy's label."""
    return run.cells


def kept(run: Run) -> pd.DataFrame:
    """One row a kept token."""
    import numpy as np
    import pandas as pd

    found = [pd.DataFrame({"trace": [], "cell": [], "layer": [], "head": [], "position": []})]
    for cell in run.cells.itertuples():
        selection = run.selection_of(cell.cell, run.trace(cell.trace).boundary)
        if selection is None:
            continue
        heads, counts = selection.granted.shape[1], np.diff(selection.offsets)
        row = np.repeat(np.arange(len(counts)), counts)
        numbers = np.full(len(selection.granted), -1)
        numbers[selection.layers] = selection.numbers
        columns = {"layer": numbers[row // heads], "head": row % heads, "position": selection.positions}
        found.append(pd.DataFrame({"trace": cell.trace, "cell": cell.cell} | columns))
    return pd.concat(found[1:] or found, ignore_index=True)


def tokens(run: Run) -> pd.DataFrame:
    """One row a token of a trace; the text is null if the run has none."""
    import pandas as pd

    found = []
    for name in run.stored_traces:
        facts, texts = run.trace(name), run.texts(name)
        found.append(pd.DataFrame({
            "trace": name, "position": range(facts.tokens), "text": texts[1] if texts else None,
            "in_prompt": [position < facts.prompt for position in range(facts.tokens)],
        }))  # fmt: skip
    return pd.concat(found, ignore_index=True)


def spans(run: Run) -> pd.DataFrame:
    """One row a span of a trace."""
    import pandas as pd

    rows = [(name, *span) for name in run.stored_traces for span in run.trace(name).spans]
    return pd.DataFrame(rows, columns=["trace", "name", "kind", "first_token", "end_token"])


def attention(run: Run, epsilon: float) -> pd.DataFrame:
    """One row a prompt token whose attention, a mean over the eval queries, is at least epsilon: for each layer the
    mean over the heads (head is null), and each query head if the run has them."""
    import numpy as np
    import pandas as pd

    found = [pd.DataFrame({"trace": [], "layer": [], "head": [], "position": [], "attention": []})]
    for name in run.stored_traces:
        facts = run.trace(name)
        for layer in facts.treated.tolist():
            for head in (None, *(range(facts.heads[layer, 0]) if run.has_attention_of_heads(name) else ())):
                values = run.eval_attention(name, layer, head)
                positions = np.flatnonzero(values >= epsilon)
                heads = pd.array([head] * len(positions), "Int64")
                found.append(pd.DataFrame({
                    "trace": name, "layer": facts.layer_numbers[layer], "head": heads, "position": positions,
                    "attention": values[positions],
                }))  # fmt: skip
    return pd.concat(found[1:] or found, ignore_index=True)


def answer(run: Run, query: str, epsilon: float = EPSILON) -> pd.DataFrame:
    """The rows of a query. Only tables whose names occur in the query are made."""
    import duckdb
    import pandas as pd

    tables: dict[str, Callable[[], pd.DataFrame]] = {
        "cells": lambda: cells(run), "kept": lambda: kept(run), "tokens": lambda: tokens(run),
        "spans": lambda: spans(run), "attention": lambda: attention(run, epsilon),
    }  # fmt: skip
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as database:
        results = run.folder / "results.csv"
        header = results.open(encoding="utf-8").readline().rstrip("\n").split(",")
        kinds = dict.fromkeys(WHOLE, "BIGINT") | dict.fromkeys(REAL, "DOUBLE") | dict.fromkeys(TRUTH, "BOOLEAN")
        kinds["seed"] = "UBIGINT"
        columns = {name: kinds.get(name, "VARCHAR") for name in header}
        database.read_csv(str(results), header=True, columns=columns).create_view("results")
        for name, make in tables.items():
            if re.search(rf"\b{name}\b", query):
                database.register(name, make())
        try:
            found = database.sql(query)
            return pd.DataFrame() if found is None else found.df()  # None: a statement without rows
        except duckdb.Error as problem:
            text = " ".join(str(problem).partition("\n\n")[0].splitlines())  # then comes the query
            raise Error("QUERY", "rejected", "a query of DuckDB", text, Refusal.USAGE) from problem


def sql(arguments: argparse.Namespace) -> None:
    """Reads, asks, prints."""
    require_format("--data", arguments.data, ".csv")
    if not 0 <= arguments.epsilon <= 1:
        raise Error("--epsilon", "out of range", "0 to 1", str(arguments.epsilon), Refusal.USAGE)
    require_run(arguments.run)

    from kvreplay.results import Run
    from kvreplay.tables import aligned, records, write_csv

    found = answer(Run(arguments.run), arguments.query, arguments.epsilon)
    if arguments.data:
        write_csv(found, arguments.data)
    if arguments.json:
        print(json.dumps(records(found), indent=2, allow_nan=False, default=str))
        return
    lines = [list(found.columns), *([shown(value) for value in row] for row in found.itertuples(index=False))]
    print("\n".join(aligned(lines, words=len(found.columns))))


def shown(value: object) -> str:
    """A value of a table: floats rounded, a dash for null."""
    import pandas as pd

    if pd.isna(value):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("\n", "\\n")


def main(argv: list[str] | None = None) -> int:
    """Prints the rows; returns the exit code."""
    return exit_code("sql", lambda: sql(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
