#!/usr/bin/env python3
"""Simulates a sweep of 80,000 cells on 1 to 256 workers, with its efficiency. Writes the table of cluster.md.

    docs/sweep_plan.py TASKS.csv OVERHEAD.json [--write]

TASKS.csv is that of a measured sweep: lengths of traces are drawn from its `seconds`. OVERHEAD.json is what
`tools/bench/sweep_overhead.py --json TRACE...` prints. The client hands out tasks to all workers that are free, in one
call, and each task costs its worker some time beside its work. A trace that takes the time of several workers is
divided among them. The merge reads each trace when it is done, one after the other. After the last one it publishes all
traces, and the workers copy the tables. Efficiency: seconds of work / (workers x seconds until the end).
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvreplay.sweep.progress import duration
from kvreplay.sweep.schedule import read_table

TASKS = 1000
POLICIES, CELLS = 20, 80  # a trace: at 4 budgets, the controls' cells apart
PAGE = Path(__file__).with_name("cluster.md")
MARKS = ("<!-- sweep_plan.py -->\n", "<!-- end of sweep_plan.py -->")


@dataclass(frozen=True)
class Costs:
    """Seconds beside the work."""

    start: float = 0.0  # until workers take tasks
    hand_out: float = 0.0  # a task, at the client
    batch: float = 0.0  # each further task that is handed out in the same call
    overhead: float = 0.0  # a task, on its worker
    arrival: float = 0.0  # a trace that is done, at the merge
    merge: float = 0.0  # a trace, when all are done
    copy: float = 0.0  # the tables of a trace, by one worker
    group: float = 0.0  # each further group of a trace, as a part of its work
    join: float = 0.0  # of the groups of a trace


def makespan(lengths: np.ndarray, workers: int, costs: Costs) -> float:
    """Seconds until all traces are done and merged. As a sweep does it: see `Plan.tasks` and `Schedule.run`."""
    waiting: deque[tuple[float, int]] = deque()  # length of a task, and its trace
    left = {}  # of each trace that is divided, the groups to come
    for trace, length in enumerate(lengths):
        groups = max(1, min(POLICIES, round(workers * length / lengths.sum())))
        waiting.extend([(length * (1 + costs.group * (groups - 1)) / groups, trace)] * groups)
        if groups > 1:
            left[trace] = groups
    running: list[tuple[float, int]] = []  # end of a task, and its trace
    client = costs.start  # when it can hand out the next task
    merged = 0.0
    while waiting or running:
        cost = costs.hand_out
        while waiting and len(running) < workers:
            length, trace = waiting.popleft()
            heapq.heappush(running, (client + costs.overhead + length, trace))
            client += cost
            cost = costs.batch
        client = max(client, running[0][0])
        while running and running[0][0] <= client:
            now, trace = heapq.heappop(running)
            if trace in left:
                left[trace] -= 1
                if left[trace] == 0:
                    del left[trace]
                    waiting.appendleft((costs.join, trace))
            else:
                merged = max(merged, now) + costs.arrival
    return merged + len(lengths) * (costs.merge + costs.copy / workers)


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


def table(measured: np.ndarray, found: dict[str, float]) -> str:
    """`found`: of tools/bench/sweep_overhead.py."""
    lengths = drawn(measured)
    costs = Costs(found["start"], found["scheduling"], found["batch"], found["program"], found["arrival"],
                  found["merge"], found["copy"] * found["tables"], found["group"], found["join"])  # fmt: skip
    lines = [
        f"{TASKS} traces with {CELLS} cells, lengths drawn from {len(measured)} measured tasks of {measured.min():.1f} "
        f"to {measured.max():.1f} s: {duration(lengths.sum())} of work.",
        "",
        f"- Start until the first task: {costs.start:.1f} s.",
        f"- Overhead for each task: {1000 * costs.overhead:.0f} ms on its worker and {1000 * costs.hand_out:.1f} ms at "
        f"the client, {1000 * costs.batch:.1f} ms for each further task that is handed out in the same call.",
        f"- Merge, for each trace: {1000 * costs.arrival:.1f} ms when it is done and {1000 * costs.merge:.1f} ms at "
        "the end.",
        f"- Copy of the {found['tables']:.0f} MB of tables of a trace: {1000 * costs.copy:.0f} ms, divided among the "
        "workers.",
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
    options.add_argument("overhead", type=Path)
    options.add_argument("--write", action="store_true", help="into docs/cluster.md")
    asked = options.parse_args()
    measured = np.array([record.seconds for record in read_table(asked.tasks).values() if record.state == "done"])
    if not len(measured):
        sys.exit(f"{asked.tasks}: no task that is done")
    text = table(measured, json.loads(asked.overhead.read_text()))
    if not asked.write:
        print(text, end="")
        return
    page = PAGE.read_text()
    begin, end = MARKS
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    PAGE.write_text(place.sub(lambda _: begin + text + end, page))


if __name__ == "__main__":
    main()
