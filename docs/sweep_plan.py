#!/usr/bin/env python3
"""A plan of 80,000 cells on 1 to 256 workers: how much of their time they compute. Writes the table of cluster.md.

    docs/sweep_plan.py TASKS.csv [--overhead SECONDS] [--join SECONDS] [--write]

TASKS.csv is that of a measured sweep: task lengths are drawn from its `seconds`. A task then costs `--overhead` beside
its work on its worker, the client hands out one task in `--hand-out` seconds, and a worker takes tasks from `--join`
seconds after the start. Efficiency: seconds of work / (workers x seconds until the last task is done).
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
from pathlib import Path

import numpy as np

from kvreplay.sweep.progress import duration
from kvreplay.sweep.schedule import read_table

TASKS = 1000
CELLS = 80  # a task: 20 policies at 4 budgets, the controls' apart
PAGE = Path(__file__).with_name("cluster.md")
MARKS = ("<!-- sweep_plan.py -->\n", "<!-- end of sweep_plan.py -->")


def makespan(lengths: np.ndarray, workers: int, overhead: float, hand_out: float, join: float) -> float:
    """Seconds until the last of these tasks is done, each given in turn to the worker that is free first."""
    free = [join] * workers
    heapq.heapify(free)
    client = 0.0  # when it can hand out the next one
    last = 0.0
    for length in lengths:
        begin = max(heapq.heappop(free), client)
        client = begin + hand_out
        end = begin + overhead + length
        last = max(last, end)
        heapq.heappush(free, end)
    return last


def drawn(seconds: np.ndarray, seed: int = 0) -> np.ndarray:
    """Lengths of the plan's tasks, the longest first as a sweep orders them."""
    return np.sort(np.random.default_rng(seed).choice(seconds, TASKS))[::-1]


def rows(lengths: np.ndarray, overhead: float, hand_out: float, join: float) -> list[tuple[int, float, float, float]]:
    """Workers, seconds until the end, speed-up over the work alone, efficiency."""
    found = []
    for workers in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        wall = makespan(lengths, workers, overhead, hand_out, join)
        found.append((workers, wall, lengths.sum() / wall, lengths.sum() / (workers * wall)))
    return found


def table(measured: np.ndarray, overhead: float, hand_out: float, join: float) -> str:
    lengths = drawn(measured)
    lines = [
        f"{TASKS} tasks of {CELLS} cells, lengths drawn from {len(measured)} measured tasks of {measured.min():.1f} to "
        f"{measured.max():.1f} s: {duration(lengths.sum())} of work; {1000 * overhead:.0f} ms beside each on its",
        f"worker, {1000 * hand_out:.1f} ms each at the client, {join:.1f} s until the first.",
        "",
        "| workers | time | speed-up | efficiency |",
        "| ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {workers} | {duration(wall)} | {faster:.1f} | {100 * share:.1f} % |"
              for workers, wall, faster, share in rows(lengths, overhead, hand_out, join)]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tasks", type=Path)
    options.add_argument("--overhead", type=float, default=0.05, help="`program` of tools/bench/sweep_overhead.py")
    options.add_argument("--hand-out", type=float, default=0.005, help="its `scheduling`")
    options.add_argument("--join", type=float, default=3.0, help="its `join`; of Slurm: how long a job waits")
    options.add_argument("--write", action="store_true", help="into docs/cluster.md")
    asked = options.parse_args()
    measured = np.array([record.seconds for record in read_table(asked.tasks).values() if record.state == "done"])
    if not len(measured):
        sys.exit(f"{asked.tasks}: no task that is done")
    text = table(measured, asked.overhead, asked.hand_out, asked.join)
    if not asked.write:
        print(text, end="")
        return
    page = PAGE.read_text()
    begin, end = MARKS
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    PAGE.write_text(place.sub(lambda _: begin + text + end, page))


if __name__ == "__main__":
    main()
