"""live/NAME.csv of a run folder: the live numbers of one trace. Columns are those of results.csv, then MEASURED, then
TEXT: what the model has written, as JSON has it, in the rows of same_tokens.

Lines are sorted as texts, so that the union of two such files, as `kvreplay merge` makes it, is that of their lines.
`live.csv` has the lines of all traces.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvreplay.errors import Error
from kvreplay.live.cells import LiveCell
from kvreplay.live.metrics import Value
from kvreplay.live.texts import answered
from kvreplay.live_metrics import BY_NAME
from kvreplay.results import COLUMNS, MEASURED, TEXT

HEADER = (*COLUMNS, *MEASURED, TEXT)
WRITTEN = "same_tokens"  # the metric that every written text has


@dataclass(frozen=True)
class Way:
    """How numbers are measured: columns of MEASURED."""

    device: str
    dtype: str
    model_hash: str


class LiveResults:
    """The rows of one trace. Rows of an earlier call are kept; a cell that was measured the same way is skipped."""

    def __init__(self, folder: Path, trace: str, way: Way) -> None:
        self.path = folder / "live" / f"{trace}.csv"
        self._measured = asdict(way)
        self._rows: dict[tuple[str, ...], list[dict[str, str]]] = {}  # by cell, way of measuring and metric
        for row in read_rows(self.path) if self.path.is_file() else []:
            self._rows.setdefault(_key(row), []).append(row)

    def _of(self, cell: LiveCell, metric: str) -> tuple[str, ...]:
        """The key of the rows of a cell that is measured this way."""
        return _key({**self._measured, "cell": cell.facts["cell"], "decisions": cell.decisions, "metric": metric})

    def has(self, cell: LiveCell, metric: str, tokens: int) -> bool:
        """Whether this metric of the cell, over `tokens` queries, exists."""
        return any(row["n_queries"] == str(tokens) for row in self._rows.get(self._of(cell, metric), ()))

    def add(self, cell: LiveCell, values: Sequence[Value], tokens: int, words: str = "") -> None:
        """Adds the numbers of a cell, measured over `tokens` queries; they replace those over more or fewer queries.
        `words` is the generated text."""
        for metric in {one.metric for one in values}:
            self._rows[self._of(cell, metric)] = []
        for one in values:
            self._rows[self._of(cell, one.metric)].append({
                **cell.facts, "n_queries": str(tokens), "open_loop": "0", "unit": BY_NAME[one.metric].unit,
                "head": "all", "layer": "all" if one.layer is None else str(one.layer), "metric": one.metric,
                "variant": one.variant, "value": _printed(one.value),
                "decisions": cell.decisions, **self._measured, TEXT: json.dumps(words) if one.metric == WRITTEN else "",
            })  # fmt: skip

    def write(self) -> None:
        """Writes all rows, atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(self.path, (row for rows in self._rows.values() for row in rows))


def _printed(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.17g}"


def compare_texts(folder: Path, trace: str, answers: Sequence[str]) -> None:
    """Compares the texts that were generated earlier with these reference answers in place of earlier ones."""
    path = folder / "live" / f"{trace}.csv"
    rows = read_rows(path) if path.is_file() else []
    compared = [
        {**row, "metric": one.metric, "unit": BY_NAME[one.metric].unit, "value": _printed(one.value), TEXT: ""}
        for row in rows if row[TEXT] for one in answered(json.loads(row[TEXT]), answers)
    ]  # fmt: skip
    if compared:
        metrics = {row["metric"] for row in compared}
        write_rows(path, [*(row for row in rows if row["metric"] not in metrics), *compared])


def _key(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("cell", "decisions", *MEASURED[1:], "metric"))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of one file."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, ValueError, csv.Error) as problem:
        raise Error(str(path), "unreadable", "CSV with a header", str(problem)) from problem
    missing = [name for name in HEADER if name not in (reader.fieldnames or ())]
    if missing:
        raise Error(str(path), "columns", ", ".join(HEADER), "no " + ", ".join(missing))
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Writes the rows to a temporary file and renames it."""
    lines = io.StringIO()
    writer = csv.DictWriter(lines, HEADER, lineterminator="\n")
    writer.writerows(rows)
    partial = path.with_name(path.name + ".partial")
    head = ",".join(HEADER) + "\n"
    partial.write_text(head + "".join(sorted(lines.getvalue().splitlines(keepends=True))), encoding="utf-8")
    os.replace(partial, path)


def write_view(folder: Path) -> None:
    """Writes live.csv of a run folder."""
    write_rows(folder / "live.csv", (row for path in (folder / "live").glob("*.csv") for row in read_rows(path)))
