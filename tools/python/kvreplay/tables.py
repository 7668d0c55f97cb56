"""Tables of numbers as text, as CSV and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvreplay.program import writing


def aligned(rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """A line a row: the first columns, as many as `words`, start below each other, the others end so."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def records(table: pd.DataFrame) -> list[dict]:
    """The rows for JSON; what is not defined is null."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """In full precision."""
    with writing(path):
        table.to_csv(path, index=False, float_format="%.17g", lineterminator="\n")
