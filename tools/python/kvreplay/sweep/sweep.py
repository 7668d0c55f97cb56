"""A sweep: plan, run on a cluster, merge. Afterwards OUT contains the same files as after a single replay.

During the run OUT/shards contains a folder of results for each attempt. Folders with run.json are complete; they are
kept even if the sweep fails. OUT/tasks.csv lists the state of each task.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.errors import Error, Refusal
from kvreplay.sweep.executors import Wanted, cluster
from kvreplay.sweep.plan import Plan, call, planned
from kvreplay.sweep.progress import Line, duration
from kvreplay.sweep.schedule import Record, Schedule, Task, read_table, write_table
from kvreplay.sweep.tables import write_tables
from kvreplay.sweep.work import SOME_FAILED

if TYPE_CHECKING:
    from distributed import Client

NO_TABLES = ("--no-tables",)


def run_plan(plan: Plan, words: Sequence[str], device: Sequence[str], wanted: Wanted, asked: argparse.Namespace) -> int:
    """Runs the plan of a replay's `words` on a cluster; returns the exit code. `device`: further options for the
    programs of the workers; `asked`: retries, resume and progress."""
    output = Path(plan.output)
    shards = output / "shards"
    if shards.is_dir() and not asked.resume:
        raise Error(str(output), "contains an unfinished sweep", "--resume, or another folder", "", Refusal.USAGE)
    try:
        shards.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise Error(str(output), "cannot be created", "", str(problem.strerror)) from problem
    with alone(shards):
        if earlier := finished(shards):
            merge(output, earlier)
            plan = planned(words)
        for folder in shards.glob("*/"):
            shutil.rmtree(folder, ignore_errors=True)
        tasks = plan.tasks(output.absolute(), wanted.gpus or wanted.workers, wanted.allowance, device)
        done = [trace.name for trace in plan.traces if trace.done]
        schedule = run_tasks(tasks, wanted, asked.retries, output / "tasks.csv", done, Line(asked.progress, "cells"),
                             lambda schedule, client: merge_tasks(output, schedule.folders, client))  # fmt: skip
        shutil.rmtree(shards, ignore_errors=True)
    return told(schedule, "cells", str(output))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks the folder, so that a single sweep uses it. The system releases the lock when this process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise Error(str(folder), "another sweep is writing to this folder; wait for it, or use another "
                                     "folder", "", "",
                        Refusal.USAGE) from problem  # fmt: skip
        except OSError:  # a file system without locks is used without
            pass
        yield
    finally:
        os.close(descriptor)


def finished(shards: Path) -> list[str]:
    """The folders of finished attempts: run.json is written last."""
    return sorted(str(path.parent) for path in shards.glob("*/run.json"))


def merge(output: Path, folders: Iterable[str], *options: str) -> None:
    """Merges into `output`. The list is a file: too long for a command line."""
    names = output / "shards" / "finished.txt"
    names.write_text("".join(f"{folder}\n" for folder in folders), encoding="utf-8")
    call(["merge", str(output), f"@{names}", "--progress", "never", *options])


def merge_tasks(output: Path, folders: Mapping[str, str], client: Client) -> None:
    """Merges the results of finished tasks, by name. Their tables are copied if they contain all rows of `output`: it
    has no earlier results, and no task of a divided trace failed."""
    if not folders:
        return
    if (output / "run.json").exists() or any("/" in name for name in folders):
        merge(output, folders.values())
        return
    merge(output, folders.values(), *NO_TABLES)
    try:
        write_tables(output, folders, client)
    except (EOFError, OSError, ValueError):  # merging says what is wrong, if it still is
        merge(output, folders.values())


def run_tasks(
    tasks: Sequence[Task],
    wanted: Wanted,
    retries: int,
    table: Path,
    done: Sequence[str],
    line: Line,
    then: Callable[[Schedule, Client], None] = lambda schedule, client: None,
) -> Schedule:
    """Runs all tasks and updates tasks.csv. `done`: names of tasks that earlier calls have finished; `then` is called
    before the cluster ends."""
    # Of divided traces only finished tasks are listed: the next call may divide differently.
    earlier = {name: row for name, row in read_table(table).items() if "/" not in name or row.state == "done"}
    for name in earlier.keys() & set(done):  # an earlier client may have died before it heard of it
        earlier[name].state, earlier[name].reason = "done", ""
    written = 0.0

    def changed(schedule: Schedule) -> None:
        nonlocal written
        if time.monotonic() - written >= 1:
            write_table(table, all_records(earlier, schedule))
            written = time.monotonic()
        line.show(schedule)

    schedule = Schedule(tasks, retries, changed)
    logs = table.parent / "slurm"
    try:
        if not tasks:
            return schedule
        with cluster(wanted, logs) as client:
            print(f"kvreplay: sweep: dashboard {client.dashboard_link}", file=sys.stderr, flush=True)
            schedule.run(client)
            then(schedule, client)
    finally:
        line.clear()
        write_table(table, all_records(earlier, schedule))
    if not schedule.of_state("failed"):
        shutil.rmtree(logs, ignore_errors=True)
    return schedule


def all_records(earlier: dict[str, Record], schedule: Schedule) -> list[Record]:
    """The records of all tasks, by name: those of earlier calls remain unless this call has a task of the same name."""
    rows = earlier | schedule.records
    return [rows[name] for name in sorted(rows)]


def told(schedule: Schedule, unit: str, output: str) -> int:
    """Prints the outcome; returns the exit code."""
    done, failed = schedule.of_state("done"), schedule.of_state("failed")
    took = schedule.seconds
    cells = sum(record.cells for record in done)
    pace = f", {cells / took:.3g} {unit}/s" if done else ""
    print(f"sweep    {len(done)} of {len(schedule.records)} tasks done   {cells} {unit} in {duration(took)}{pace}   "
          f"{output}")  # fmt: skip
    for record in failed:
        print(f"kvreplay: failed: {record.name}: {record.reason} ({record.attempts} attempts)", file=sys.stderr)
    partly = [record for record in done if record.reason]
    for record in partly:
        print(f"kvreplay: some cells failed: {record.name}: {record.reason}", file=sys.stderr)
    return SOME_FAILED if failed or partly else 0
