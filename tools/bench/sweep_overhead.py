#!/usr/bin/env python3
"""What a task costs beside its work: seconds a task through Dask, of work that does nothing and of a tiny replay.

    tools/bench/sweep_overhead.py [--tasks N] [--workers N] [--json]

`scheduling`: tasks whose work returns at once. `program`: replays of tiny traces as tasks, less the same replays called
one after the other, which take `replay`. `join`: seconds until a worker of this machine takes tasks. `merge`: seconds a
task.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvreplay.program import program
from kvreplay.sweep.executors import Wanted, cluster
from kvreplay.sweep.schedule import Schedule, Task
from kvreplay.sweep.sweep import finished, merge
from kvreplay.sweep.work import Allowance, Outcome, Replay

SHAPE = ["--layers", "2", "--prompt", "64", "--continuation", "8", "--head-dim", "8"]
ASKED = ["-p", "local", "-b", "0.5"]


def nothing() -> Outcome:
    return Outcome(True)


def scheduled(client, calls: list[Callable[[], Outcome]]) -> float:
    """Seconds of all of them."""
    schedule = Schedule([Task(f"task-{i}", 1, Path("/"), call) for i, call in enumerate(calls)], 0)
    schedule.run(client)
    assert len(schedule.of_state("done")) == len(calls), schedule.records
    return schedule.seconds


def measure(tasks: int, workers: int, folder: Path) -> dict[str, float]:
    """Seconds by what they are for."""
    found: dict[str, float] = {}
    output = folder / "out"
    names = [f"tiny-{i}" for i in range(tasks)]
    for i, name in enumerate(names):
        words = ["synth", "sinks", "-o", str(folder / f"{name}.h5"), "--seed", str(i), *SHAPE]
        subprocess.run([*program(), *words], check=True, stdout=subprocess.DEVNULL)
    shards = output / "shards"
    shards.mkdir(parents=True)
    command = (*program(), "replay", *ASKED)

    def replay(name: str, into: Path) -> Replay:
        return Replay(command, "/", str(folder / f"{name}.h5"), name, str(into), "", Allowance(1, None))

    direct = time.monotonic()
    for name in names:
        assert replay(name, folder / "direct")().ok
    direct = (time.monotonic() - direct) / tasks
    begin = time.monotonic()
    with cluster(Wanted("local", workers, 0, Allowance(1, None), ()), folder) as client:
        client.wait_for_workers(workers)
        scheduled(client, [nothing] * workers)
        found["join"] = time.monotonic() - begin
        found["scheduling"] = scheduled(client, [nothing] * tasks) / tasks
        found["program"] = workers * scheduled(client, [replay(name, shards) for name in names]) / tasks - direct
    found["replay"] = direct
    begin = time.monotonic()
    merge(output, finished(shards))
    found["merge"] = (time.monotonic() - begin) / tasks
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tasks", type=int, default=200)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        found = measure(asked.tasks, asked.workers, Path(folder))
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for name, seconds in found.items():
        print(f"{name:12}{1000 * seconds:10.1f} ms")


if __name__ == "__main__":
    sys.exit(main())
