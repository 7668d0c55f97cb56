"""Tables of numbers as text, as CSV and as JSON."""

from __future__ import annotations

import shutil
import textwrap
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


def terminal_width() -> int:
    """Characters of a line: those of the terminal, or $COLUMNS; without both 80."""
    return shutil.get_terminal_size().columns


def narrowed(rows: Sequence[Sequence[str]], words: int, omissible: Sequence[int]) -> tuple[list[str], list[str]]:
    """The lines of `aligned`, and the titles, in the first row, of the columns that are left out: as many of
    `omissible`, in this order, as a line is too short for."""
    every = range(len(rows[0]))
    for count in range(len(omissible) + 1):
        places = [place for place in every if place not in omissible[:count]]
        lines = aligned([[row[place] for place in places] for row in rows], sum(place < words for place in places))
        if max(map(len, lines)) <= terminal_width():
            break
    return lines, [rows[0][place] for place in every if place not in places]


def wrapped(text: str, indent: str = "") -> list[str]:
    """The text in lines of that width, with longer words whole; `indent`: of all but the first."""
    width = terminal_width()
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def records(table: pd.DataFrame) -> list[dict]:
    """The rows for JSON; undefined values are null."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """In full precision."""
    with writing(path):
        table.to_csv(path, index=False, float_format="%.17g", lineterminator="\n")
