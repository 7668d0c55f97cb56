#!/usr/bin/env python3
"""A plan of 80,000 cells on 1 to 256 workers: how much of their time they compute. Writes the table of cluster.md.

    docs/sweep_plan.py TASKS.csv [--overhead SECONDS] [--hand-out SECONDS] [--join SECONDS] [--merge SECONDS] [--write]

TASKS.csv is that of a measured sweep: task lengths are drawn from its `seconds`. A task then costs `--overhead` beside
its work on its worker, the client hands out one task in `--hand-out` seconds, a worker takes tasks from `--join`
seconds after the start, and when the last is done the client merges all, one in `--merge` seconds. Efficiency: seconds
of work / (workers x seconds until all is merged).
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvreplay.sweep.progress import duration
from kvreplay.sweep.schedule import read_table

TASKS = 1000
CELLS = 80  # a task: 20 policies at 4 budgets, the controls' apart
PAGE = Path(__file__).with_name("cluster.md")
MARKS = ("<!-- sweep_plan.py -->\n", "<!-- end of sweep_plan.py -->")


@dataclass(frozen=True)
class Costs:
    """Seconds beside the work."""

    overhead: float  # a task, on its worker
    hand_out: float  # a task, at the client
    join: float  # until workers take tasks
    merge: float  # a task, at the client when the last is done


def makespan(lengths: np.ndarray, workers: int, costs: Costs) -> float:
    """Seconds until all of these tasks are done and merged, each given in turn to the worker that is free first."""
    free = [costs.join] * workers
    heapq.heapify(free)
    client = 0.0  # when it can hand out the next one
    last = 0.0
    for length in lengths:
        begin = max(heapq.heappop(free), client)
        client = begin + costs.hand_out
        end = begin + costs.overhead + length
        last = max(last, end)
        heapq.heappush(free, end)
    return last + costs.merge * len(lengths)


def drawn(seconds: np.ndarray, seed: int = 0) -> np.ndarray:
    """Lengths of the plan's tasks, the longest first as a sweep orders them."""
    return np.sort(np.random.default_rng(seed).choice(seconds, TASKS))[::-1]


def rows(lengths: np.ndarray, costs: Costs) -> list[tuple[int, float, float, float]]:
    """Workers, seconds until the end, speed-up over the work alone, efficiency."""
    found = []
    for workers in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        wall = makespan(lengths, workers, costs)
        found.append((workers, wall, lengths.sum() / wall, lengths.sum() / (workers * wall)))
    return found


def table(measured: np.ndarray, costs: Costs) -> str:
    lengths = drawn(measured)
    lines = [
        f"{TASKS} tasks of {CELLS} cells, lengths drawn from {len(measured)} measured tasks of {measured.min():.1f} to "
        f"{measured.max():.1f} s: {duration(lengths.sum())} of work;",
        f"{1000 * costs.overhead:.0f} ms beside each on its worker, {1000 * costs.hand_out:.1f} ms each at the client, "
        f"{costs.join:.1f} s until the first, {1000 * costs.merge:.0f} ms each to merge at the end.",
        "",
        "| workers | time | speed-up | efficiency |",
        "| ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {workers} | {duration(wall)} | {faster:.1f} | {100 * share:.1f} % |"
              for workers, wall, faster, share in rows(lengths, costs)]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tasks", type=Path)
    options.add_argument("--overhead", type=float, default=0.05, help="`program` of tools/bench/sweep_overhead.py")
    options.add_argument("--hand-out", type=float, default=0.005, help="its `scheduling`")
    options.add_argument("--join", type=float, default=3.0, help="its `join`; of Slurm: how long a job waits")
    options.add_argument("--merge", type=float, default=0.1, help="its `merge`, or that of the measured sweep")
    options.add_argument("--write", action="store_true", help="into docs/cluster.md")
    asked = options.parse_args()
    measured = np.array([record.seconds for record in read_table(asked.tasks).values() if record.state == "done"])
    if not len(measured):
        sys.exit(f"{asked.tasks}: no task that is done")
    text = table(measured, Costs(asked.overhead, asked.hand_out, asked.join, asked.merge))
    if not asked.write:
        print(text, end="")
        return
    page = PAGE.read_text()
    begin, end = MARKS
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    PAGE.write_text(place.sub(lambda _: begin + text + end, page))


if __name__ == "__main__":
    main()
