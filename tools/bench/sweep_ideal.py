#!/usr/bin/env python3
"""A sweep of traces against the ideal of its cores: as many plain replays as cores, each of some traces.

    tools/bench/sweep_ideal.py TRACE... [--workers N] [--repeats N] [options of kvreplay replay]

The ideal divides the traces by their sizes, so that its replays end together. Every program computes with one thread,
by default twenty policies at four budgets. Calls alternate. Each prints the seconds of its wall clock, from start to
tables, and the CPU seconds of all its processes; medians follow. The sweep must write the results.csv of the merged
replays. Files are written below the current folder.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sweep_overhead import PLAN

from kvreplay.program import program
from kvreplay.sweep.executors import cores_here

REAP_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER: the processes of Dask end after their parents
OPTIONS = ["--threads", "1", "--progress", "never", "-q"]


def seconds_of(commands: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Of the wall clock until the last of these commands ended, and of the CPU with all their descendants."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    for process in [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]:
        if code := process.wait():
            sys.exit(f"{' '.join(process.args)}: exit code {code}")
    wall = time.monotonic() - begin
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def shares(traces: Sequence[str], count: int) -> list[list[str]]:
    """Traces for `count` replays of equal work: the largest first, each to the replay with the least bytes."""
    found: list[list[str]] = [[] for _ in range(count)]
    sizes = {trace: Path(trace).stat().st_size for trace in traces}
    for trace in sorted(traces, key=sizes.__getitem__, reverse=True):
        min(found, key=lambda share: sum(sizes[name] for name in share)).append(trace)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("traces", nargs="+")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--repeats", type=int, default=3)
    asked, rest = options.parse_known_args()
    words = [*(rest or PLAN), *OPTIONS]
    ctypes.CDLL(None).prctl(REAP_ORPHANS, 1, 0, 0, 0)
    times: dict[str, list[tuple[float, float]]] = {"ideal": [], "sweep": []}
    for _ in range(asked.repeats):
        with tempfile.TemporaryDirectory(prefix="ideal-", dir=".") as folder:
            parts = [str(Path(folder, f"part-{i}")) for i in range(cores_here())]
            replays = [
                [*program(), "replay", *share, *words, "-o", part]
                for share, part in zip(shares(asked.traces, len(parts)), parts, strict=True)
            ]
            whole, swept = str(Path(folder, "whole")), str(Path(folder, "swept"))
            sweep = [*program(), "sweep", *asked.traces, *words, "--workers", str(asked.workers), "-o", swept]
            for name, commands in (("ideal", replays), ("sweep", [sweep])):
                times[name].append(seconds_of(commands))
                print(f"{name}  wall {times[name][-1][0]:.1f} s   CPU {times[name][-1][1]:.1f} s", flush=True)
            subprocess.run([*program(), "merge", whole, *parts, "-q"], check=True)
            if Path(whole, "results.csv").read_bytes() != Path(swept, "results.csv").read_bytes():
                sys.exit("results.csv of the sweep differs from that of the replays")
    for i, name in enumerate(("wall", "CPU")):
        ideal, swept = (statistics.median(time[i] for time in times[kind]) for kind in ("ideal", "sweep"))
        print(f"median {name:4}  ideal {ideal:.1f} s   sweep {swept:.1f} s   {100 * (swept / ideal - 1):+.1f} %")


if __name__ == "__main__":
    main()
