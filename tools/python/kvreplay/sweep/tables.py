"""results.csv and seconds.csv of a sweep, put together from those of its tasks.

Both tables have a header and then the rows of each trace, by the names of the traces. The table of a task is therefore
one piece of the sweep's, and the sizes of the files say where each piece begins. Workers copy equal parts at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.sweep.schedule import Schedule, Task, workers_of
from kvreplay.sweep.work import Outcome, names_of_worker

if TYPE_CHECKING:
    from distributed import Client

TABLES = ("results.csv", "seconds.csv")
BLOCK = 1 << 20  # bytes; parts begin at multiples of it, so that two workers never write to the same block of a disk
PART = 64 << 20  # bytes; a smaller part takes less time to copy than to hand out


@dataclass(frozen=True)
class Piece:
    """The rows of one file, and their place in the table."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class Part:
    """Bytes `begin` to `end` of a table, from the rows of `pieces`."""

    table: str
    header: bytes
    pieces: tuple[Piece, ...]
    begin: int
    end: int

    def __call__(self) -> Outcome:
        start = time.monotonic()
        table = os.open(self.table, os.O_WRONLY)
        try:
            for piece in self.pieces:
                self._copy(piece, table)
            os.fsync(table)
        finally:
            os.close(table)
        return Outcome(True, "", self.table, time.monotonic() - start, *names_of_worker())

    def _copy(self, piece: Piece, table: int) -> None:
        at, end = max(self.begin, piece.begin), min(self.end, piece.end)
        with open(piece.path, "rb", buffering=0) as file:
            if file.read(len(self.header)) != self.header:
                raise ValueError(f"{piece.path}: another header")
            while at < end:
                place = at - piece.begin + len(self.header)
                try:
                    copied = os.copy_file_range(file.fileno(), table, end - at, place, at)
                except OSError:  # not every file system, and not between any two
                    copied = os.pwrite(table, os.pread(file.fileno(), min(end - at, BLOCK), place), at)
                if copied == 0:
                    raise EOFError(f"{piece.path}: too short")
                at += copied


def parts(table: Path, files: Sequence[Path], workers: int) -> list[Part]:
    """A new file `table` that begins with the header of `files` and has room for all their rows; the copies to make."""
    with files[0].open("rb") as first:
        header = first.readline()
    pieces, end = [], len(header)
    for file in files:
        begin, end = end, end + file.stat().st_size - len(header)
        pieces.append(Piece(str(file), begin, end))
    with table.open("wb") as made:
        made.write(header)
        made.truncate(end)
    step = max(PART, -(-end // workers // BLOCK) * BLOCK)
    return [
        Part(str(table), header, tuple(piece for piece in pieces if piece.begin < begin + step and piece.end > begin),
             begin, begin + step)
        for begin in range(0, end, step)
    ]  # fmt: skip


def write_tables(output: Path, folders: Mapping[str, str], client: Client) -> None:
    """The tables of `output`, whose traces are those of `folders` by name. Raises OSError, EOFError or ValueError."""
    ordered = [Path(folders[name]) for name in sorted(folders, key=os.fsencode)]
    tables = [output.absolute() / name for name in TABLES]
    partial = [table.with_name(f"{table.name}.partial") for table in tables]
    workers = max(1, sum(worker.room for worker in workers_of(client)))
    copies = [part for path in partial for part in parts(path, [folder / path.stem for folder in ordered], workers)]
    try:
        if len(copies) > len(tables):  # else this process is as fast
            copying = Schedule([Task(f"{part.table} {part.begin}", 1, Path(part.table), part) for part in copies], 3)
            copying.run(client)
            if failed := copying.of_state("failed"):
                raise OSError(failed[0].reason)
        else:
            for part in copies:
                part()
        for path, table in zip(partial, tables, strict=True):
            os.replace(path, table)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
