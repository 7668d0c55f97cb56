"""A sweep: plan, run on a cluster and merge meanwhile. Afterwards OUT contains the same files as after a single replay.

During the run OUT/shards contains a folder of results for each attempt. Folders with run.json are complete; they are
kept even if the sweep fails. OUT/tasks.csv lists the state of each task.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvreplay.errors import Error, Refusal
from kvreplay.program import program
from kvreplay.sweep.executors import Wanted, cluster
from kvreplay.sweep.plan import Plan, call, planned, require_success
from kvreplay.sweep.progress import Line, duration
from kvreplay.sweep.schedule import Record, Schedule, Task, read_table, write_table
from kvreplay.sweep.tables import write_tables
from kvreplay.sweep.work import SOME_FAILED, dies_with

if TYPE_CHECKING:
    from distributed import Client


def run_plan(plan: Plan, words: Sequence[str], device: Sequence[str], wanted: Wanted, asked: argparse.Namespace) -> int:
    """Runs the plan of a replay's `words` on a cluster; returns the exit code. `device`: further options for the
    programs of the workers; `asked`: retries and progress. Continues a sweep that was interrupted."""
    output = Path(plan.output)
    shards = output / "shards"
    try:
        shards.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise Error(str(output), "cannot be created", "", str(problem.strerror)) from problem
    with alone(shards):
        if earlier := finished(shards):
            with Merge(output, writes_tables=True) as merge:
                for folder in earlier:
                    merge.add(folder)
                merge.finish()
            plan = planned(words)
        for folder in shards.glob("*/"):
            shutil.rmtree(folder, ignore_errors=True)
        tasks = plan.tasks(output.absolute(), wanted.gpus or wanted.workers, wanted.allowance, device)
        done = [trace.name for trace in plan.traces if trace.done]
        line = Line(asked.progress, "cells")
        with Merge(output, writes_tables=(output / "run.json").exists()) as merge:
            schedule = run_tasks(tasks, wanted, asked.retries, output / "tasks.csv", done, line,
                                 lambda name, folder: None if is_group(name) else merge.add(folder),
                                 lambda schedule, client: finish_tables(merge, schedule, client))  # fmt: skip
        shutil.rmtree(shards, ignore_errors=True)
    return told(schedule, "cells", str(output), len(done))


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


def is_group(name: str) -> bool:
    """Whether a task is a part of a divided trace: `NAME 1/3`."""
    return "/" in name


class Merge:
    """`kvreplay merge OUT -`: reads and checks folders while others are computed. On exit without `finish` nothing is
    merged."""

    def __init__(self, output: Path, writes_tables: bool) -> None:
        self.output, self.writes_tables = output, writes_tables
        self._folders = 0
        self._said = tempfile.TemporaryFile()
        options = [] if writes_tables else ["--no-tables"]
        self.process = subprocess.Popen(
            [*program(), "merge", str(output), "-", "--progress", "never", *options], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=self._said, process_group=0, preexec_fn=dies_with(os.getpid()),
        )  # fmt: skip

    def __enter__(self) -> Merge:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self._close()
        self._said.close()

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def add(self, folder: str) -> None:
        self._folders += 1
        with contextlib.suppress(BrokenPipeError):  # finish() raises the error of the program
            self.process.stdin.write(os.fsencode(f"{folder}\n"))
            self.process.stdin.flush()

    def finish(self) -> None:
        """Publishes all folders; without any, nothing changes."""
        if self._folders:
            self._close()
            self._said.seek(0)
            require_success(self.process.returncode, self._said.read().decode("utf-8", "replace"))


def finish_tables(merge: Merge, schedule: Schedule, client: Client) -> None:
    """Publishes the merge. The tables of the tasks are copied if they contain all rows: OUT has no earlier results, and
    no task of a divided trace failed."""
    groups = [folder for name, folder in schedule.folders.items() if is_group(name)]
    for folder in groups:
        merge.add(folder)
    merge.finish()
    if merge.writes_tables or not schedule.folders:
        return
    if not groups:  # else the rows of a trace are in several tables
        with contextlib.suppress(EOFError, OSError, ValueError):  # merging reports the reason if it remains
            write_tables(merge.output, schedule.folders, client)
            return
    call(["merge", str(merge.output), "--progress", "never"])


def run_tasks(
    tasks: Sequence[Task],
    wanted: Wanted,
    retries: int,
    table: Path,
    done: Sequence[str],
    line: Line,
    ended: Callable[[str, str], None] = lambda name, folder: None,
    then: Callable[[Schedule, Client], None] = lambda schedule, client: None,
) -> Schedule:
    """Runs all tasks and updates tasks.csv. `done`: names of tasks that earlier calls have finished; `ended` is called
    for each task that is done, `then` before the cluster ends."""
    # Of divided traces only finished tasks are listed: the next call may divide differently.
    earlier = {name: row for name, row in read_table(table).items() if not is_group(name) or row.state == "done"}
    for name in earlier.keys() & set(done):  # an earlier client may have died before it heard of it
        earlier[name].state, earlier[name].reason = "done", ""
    written = 0.0

    def changed(schedule: Schedule) -> None:
        nonlocal written
        if time.monotonic() - written >= 1:
            write_table(table, all_records(earlier, schedule))
            written = time.monotonic()
        line.show(schedule)

    schedule = Schedule(tasks, retries, changed, ended)
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


def told(schedule: Schedule, unit: str, output: str, earlier: int) -> int:
    """Prints the outcome; returns the exit code. `earlier`: number of tasks that earlier calls have finished."""
    if not schedule.records:
        print(f"sweep    every task is done, by earlier calls: {earlier}   {output}")
        return 0
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
