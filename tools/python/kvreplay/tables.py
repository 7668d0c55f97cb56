"""Tables of numbers as text, as CSV and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.program import writing

if TYPE_CHECKING:
    import pandas as pd


def aligned(rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """One line for each row. The first `words` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def records(table: pd.DataFrame) -> list[dict]:
    """The rows for JSON; undefined values are null."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """In full precision."""
    with writing(path):
        table.to_csv(path, index=False, float_format="%.17g", lineterminator="\n")
