"""The plan of a sweep: the dry run of `kvreplay replay`, and the tasks for each unfinished trace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvreplay.errors import Error
from kvreplay.program import program
from kvreplay.sweep.progress import duration
from kvreplay.sweep.schedule import Task
from kvreplay.sweep.work import DONE, SOME_FAILED, Allowance, Join, Replay


@dataclass(frozen=True)
class PlannedTrace:
    """One trace of the dry run."""

    name: str
    path: str
    cells: int  # to be computed
    skipped: int  # that the folder of results has
    seconds: float  # with all threads of the machine that planned
    memory_bytes: int
    disk_bytes: int

    @property
    def done(self) -> bool:
        """Whether all cells are finished. A trace without any cell is not done: the replay prints the reason."""
        return self.cells == 0 and self.skipped > 0


@dataclass(frozen=True)
class Plan:
    """The replay of all traces."""

    words: tuple[str, ...]  # a replay's, to which traces and a folder are appended
    traces: tuple[PlannedTrace, ...]
    output: str  # the folder of results

    @property
    def left(self) -> list[PlannedTrace]:
        return [trace for trace in self.traces if not trace.done]

    def table(self, workers: int) -> str:
        """The remaining work of each trace, and of all."""
        rows = [(trace.name, trace.cells, trace.seconds, trace.memory_bytes, trace.disk_bytes) for trace in self.left]
        cells, seconds, disk = (sum(row[i] for row in rows) for i in (1, 2, 4))
        memory = max((row[3] for row in rows), default=0)
        width = max([len(row[0]) for row in rows] + [5])
        lines = [f"{'task':{width}}  {'cells':>7}  {'time':>12}  {'memory':>10}  {'results':>10}"]
        for name, count, time, held, left in [*rows, ("all", cells, seconds, memory, disk)]:
            lines.append(f"{name:{width}}  {count:7}  {duration(time):>12}  {mib(held):>10}  {mib(left):>10}")
        lines.append(
            f"{len(rows)} tasks on {workers} workers, each as fast as this machine: {duration(seconds / workers)}"
        )
        return "\n".join(lines)

    def tasks(self, output: Path, workers: int, allowance: Allowance, device: Sequence[str]) -> list[Task]:
        """One for each unfinished trace; the longest first, so that the sweep does not end with one long task. A trace
        with the work of k workers becomes k tasks, each with some of its policies, and one that joins them."""
        shards, directory = str(output / "shards"), str(Path.cwd())
        all_seconds = sum(trace.seconds for trace in self.left)
        tasks = []
        for trace in sorted(self.left, key=lambda trace: -trace.seconds):
            groups = self.groups(round(workers * trace.seconds / all_seconds) if all_seconds else 1)
            names = [f"{trace.name} {i + 1}/{len(groups)}" for i in range(len(groups))] if groups[1:] else [trace.name]
            file, path = Path(trace.path).resolve(), str(Path(trace.path).absolute())
            for i, (name, words) in enumerate(zip(names, groups, strict=True)):
                cells = trace.cells * (i + 1) // len(groups) - trace.cells * i // len(groups)
                call = Replay((*program(), *words, *device), directory, path, name, shards,
                              str(output / "cells" / f"{trace.name}.h5"), allowance)  # fmt: skip
                tasks.append(Task(name, cells, file, call))
            if groups[1:]:
                tasks.append(Task(trace.name, 0, file, Join(program(), trace.name, shards), tuple(names)))
        return tasks

    def groups(self, count: int) -> list[tuple[str, ...]]:
        """The words of at most `count` replays, each with some of the policies."""
        policies = [i for i, word in enumerate(self.words, 1) if word == "--policy"]
        if "--exclude" in self.words:  # an exclusion without effect is an error, as in a group without its policy
            return [self.words]
        count = max(1, min(count, len(policies)))
        taken = [{*policies[group::count]} for group in range(count)]
        left_out = [{place for i in policies if i not in group for place in (i - 1, i)} for group in taken]
        return [tuple(word for i, word in enumerate(self.words) if i not in places) for places in left_out]


def mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def call(words: Sequence[str], repeats_notes: bool = False) -> str:
    """Runs the program and returns its output. Its error is raised as Error. `repeats_notes`: prints its stderr."""
    answer = subprocess.run([*program(), *words], capture_output=True, text=True)
    require_success(answer.returncode, answer.stderr)
    if repeats_notes:
        print(answer.stderr, end="", file=sys.stderr)
    return answer.stdout


def require_success(code: int, stderr: str) -> None:
    """Raises the error of a program that left no results. Failed cells are listed in run.json."""
    if code not in (DONE, SOME_FAILED):
        raise Error(stderr.strip().split("\n")[-1].removeprefix("kvreplay: "), "", exit_code=code)


def planned(words: Sequence[str], repeats_notes: bool = False) -> Plan:
    """The plan of `kvreplay replay WORDS`. `repeats_notes`: prints its notes, such as the file that gives defaults."""
    document = json.loads(call(["replay", *words, "--dry-run", "--json"], repeats_notes))
    traces = [
        PlannedTrace(trace["name"], trace["path"], len(trace["cells"]), trace["skipped"], trace["seconds"],
                     trace["memory_bytes"], trace["disk_bytes"])
        for trace in document["traces"]
    ]  # fmt: skip
    return Plan(tuple(document["words"]), tuple(traces), document["output"])
