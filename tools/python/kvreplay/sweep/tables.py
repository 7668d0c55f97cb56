"""results.csv and seconds.csv of a sweep, copied from those of its tasks.

Both have a header and then the rows of each trace, by name. The rows of a task are therefore one range of the table,
and the sizes of the files say which. Workers copy equal parts of a table, at least 64 MiB each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.sweep.schedule import Schedule, Task, workers_of
from kvreplay.sweep.work import Outcome

if TYPE_CHECKING:
    from distributed import Client

TABLES = ("results.csv", "seconds.csv")
BLOCK = 1 << 20  # bytes; parts begin at multiples of it, so that two workers never write to the same block of a disk
PART = 64 << 20  # bytes; a smaller part takes less time to copy than to hand out


@dataclass(frozen=True)
class Part:
    """Bytes `begin` to `end` of a table."""

    table: str
    header: bytes
    files: tuple[tuple[str, int, int], ...]  # with the places in the table where the rows of each begin and end
    begin: int
    end: int

    def __call__(self) -> Outcome:
        with open(self.table, "r+b", buffering=0) as table:
            for path, begin, end in self.files:
                with open(path, "rb", buffering=0) as file:
                    if file.read(len(self.header)) != self.header:
                        raise ValueError(f"{path}: another header")
                    place, end, skip = max(begin, self.begin), min(end, self.end), len(self.header) - begin
                    while place < end:
                        place += copy(file.fileno(), place + skip, table.fileno(), place, end - place)
            os.fsync(table.fileno())
        return Outcome(True)


def copy(source: int, begin: int, target: int, place: int, count: int) -> int:
    """How many bytes of one file were copied to a place in another one."""
    try:
        copied = os.copy_file_range(source, target, count, begin, place)
    except OSError:  # not every file system, and not between any two
        copied = os.pwrite(target, os.pread(source, min(count, BLOCK), begin), place)
    if copied == 0:
        raise EOFError
    return copied


def parts(table: Path, files: Sequence[Path], workers: int) -> list[Part]:
    """The copies that fill `table`, a new file with the header of `files` and room for the rows of all of them."""
    with files[0].open("rb") as first:
        header = first.readline()
    end = len(header)
    ranges = [(str(file), end, end := end + file.stat().st_size - len(header)) for file in files]
    table.write_bytes(header)
    os.truncate(table, end)
    step = max(PART, -(-end // workers // BLOCK) * BLOCK)
    return [Part(str(table), header, tuple(rows for rows in ranges if rows[1] < begin + step and rows[2] > begin),
                 begin, begin + step) for begin in range(0, end, step)]  # fmt: skip


def write_tables(output: Path, folders: Mapping[str, str], client: Client) -> None:
    """The tables of `output`, whose traces are those of `folders` by name. Raises OSError, EOFError or ValueError."""
    ordered = [Path(folders[name]) for name in sorted(folders, key=os.fsencode)]
    partial = {name: output.absolute() / f"{name}.partial" for name in TABLES}
    workers = max(1, sum(worker.room for worker in workers_of(client)))
    copies = [part for name in TABLES for part in parts(partial[name], [folder / name for folder in ordered], workers)]
    if len(copies) == len(TABLES):  # this process is as fast
        for part in copies:
            part()
    else:
        copying = Schedule([Task(f"{part.table} {part.begin}", 1, Path(part.table), part) for part in copies], 3)
        copying.run(client)
        if failed := copying.of_state("failed"):
            raise OSError(failed[0].reason)
    for name, path in partial.items():
        os.replace(path, output / name)
