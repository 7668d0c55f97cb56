"""The rows of live/NAME.csv: columns of results.csv, and where and how they were measured."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable
from pathlib import Path

from kvreplay.errors import Error
from kvreplay.live.cards import METRICS
from kvreplay.live.cells import LiveCell
from kvreplay.live.metrics import Value
from kvreplay.results import COLUMNS

MEASURED = ("decisions", "device", "dtype", "model_hash")  # part of a row's key
KEY = ("trace", "policy", "params", "budget", "cell", "metric", "variant", "layer", *MEASURED)
UNITS = {metric.name: metric.unit for metric in METRICS}


class LiveResults:
    """live/NAME.csv of one trace in a run folder. Rows of an earlier call stay; the same cell measured the same way is
    not measured again."""

    def __init__(self, folder: Path, trace: str, device: str, dtype: str, model_hash: str) -> None:
        self.path = folder / "live" / f"{trace}.csv"
        self._measured = {"device": device, "dtype": dtype, "model_hash": model_hash}
        self._rows: list[dict[str, str]] = []
        if self.path.is_file():
            try:
                with open(self.path, encoding="utf-8", newline="") as file:
                    self._rows = list(csv.DictReader(file))
            except (OSError, ValueError) as problem:
                raise Error(str(self.path), "unreadable", "CSV with a header", str(problem)) from problem
            if self._rows and set(self._rows[0]) != {*COLUMNS, *MEASURED}:
                missing = sorted({*COLUMNS, *MEASURED} - set(self._rows[0]))
                raise Error(str(self.path), "columns", ", ".join([*COLUMNS, *MEASURED]), "no " + ", ".join(missing))

    def has(self, cell: LiveCell, metric: str) -> bool:
        """Whether this metric of the cell is there already."""
        wanted = {**self._measured, "cell": cell.facts["cell"], "decisions": cell.decisions, "metric": metric}
        return any(wanted.items() <= row.items() for row in self._rows)

    def add(self, cell: LiveCell, values: Iterable[Value], tokens: int) -> None:
        """The numbers of a cell, measured over `tokens` queries."""
        for one in values:
            self._rows.append({
                **{name: str(value) for name, value in cell.facts.items()},
                "n_queries": str(tokens), "eval": "continuation", "open_loop": "0",
                "layer": "all" if one.layer is None else str(one.layer), "head": "all",
                "metric": one.metric, "variant": one.variant, "unit": UNITS[one.metric],
                "value": "nan" if math.isnan(one.value) else repr(float(one.value)),
                "decisions": cell.decisions, **self._measured,
            })  # fmt: skip

    def write(self) -> None:
        """All rows, sorted: whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(self.path, self._rows)


def write_view(folder: Path) -> None:
    """live.csv: the rows of all traces."""
    rows: list[dict[str, str]] = []
    for path in sorted((folder / "live").glob("*.csv")):
        with open(path, encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    write_rows(folder / "live.csv", rows)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Into a file of another name, which then takes the name."""
    partial = path.with_name(path.name + ".partial")
    order = sorted(rows, key=lambda row: [row[name] for name in KEY])
    with open(partial, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *MEASURED], lineterminator="\n")
        writer.writeheader()
        writer.writerows(order)
    os.replace(partial, path)
