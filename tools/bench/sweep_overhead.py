#!/usr/bin/env python3
"""What a sweep costs beside its work, in seconds: through Dask, of work that does nothing and of a tiny replay.

    tools/bench/sweep_overhead.py [TRACE...] [--tasks N] [--workers N] [--json]

`start`: until a worker of this machine takes tasks. `scheduling`: CPU time of this process, client and scheduler, for
each task that takes the place of another; `batch`: for each of many tasks that are submitted together. `program`: for
each task on its worker, replays of tiny traces as tasks, less the same replays called one after the other, which take
`replay`. `merge`: CPU time after the last folder, for each folder; `arrival`: before that.
With traces: `copy` for each MB of the tables, by one process; `group`: the work that a second group adds, as a share of
a trace's work; `join`: for each trace in two groups.
All replays have twenty policies at four budgets and one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvreplay.program import program
from kvreplay.sweep.executors import Wanted, cluster
from kvreplay.sweep.plan import planned
from kvreplay.sweep.schedule import Schedule, Task
from kvreplay.sweep.sweep import Merge, finished
from kvreplay.sweep.tables import TABLES, parts
from kvreplay.sweep.work import Allowance, Outcome, Replay, perform

SHAPE = ["--layers", "2", "--prompt", "640", "--continuation", "8", "--head-dim", "8"]
POLICIES = (
    "snapkv,h2o,chunkkv,local,streaming-llm,tova,knorm,keydiff,lagkv,expected-attention,ada-kv,pyramid-kv,vatp,"
    "observed-attention,value-norm,strided,truncate,nacl,scissorhands,cur"
)
UNITS = {"tables": "MB a trace", "group": "of its work"}
PLAN = ["-p", POLICIES, "-b", "0.05,0.1,0.2,0.4"]


def nothing() -> Outcome:
    return Outcome(True)


def scheduled(client, calls: list[Callable[[], Outcome]]) -> float:
    """Seconds of all of them."""
    schedule = Schedule([Task(f"task-{i}", 1, Path("/"), call) for i, call in enumerate(calls)], 0)
    schedule.run(client)
    assert len(schedule.of_state("done")) == len(calls), schedule.records
    return schedule.seconds


def measure(tasks: int, workers: int, folder: Path) -> dict[str, float]:
    """Seconds by what they are for, of tiny traces."""
    found: dict[str, float] = {}
    names = [f"tiny-{i}" for i in range(tasks)]
    for i, name in enumerate(names):
        words = ["synth", "sinks", "-o", str(folder / f"{name}.h5"), "--seed", str(i), *SHAPE]
        subprocess.run([*program(), *words], check=True, stdout=subprocess.DEVNULL)
    output = folder / "out"
    command = (*program(), "replay", *PLAN)

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
        found["start"] = time.monotonic() - begin
        begin = time.process_time()
        scheduled(client, [nothing] * tasks)
        found["scheduling"] = (time.process_time() - begin) / tasks
        begin = time.process_time()
        client.gather(client.map(perform, [nothing] * tasks, [()] * tasks, pure=False))
        found["batch"] = (time.process_time() - begin) / tasks
        replays = [replay(name, output / "shards") for name in names]
        found["program"] = workers * scheduled(client, replays) / tasks - direct
    found["replay"] = direct
    return found | measure_merge(output)


def measure_merge(output: Path) -> dict[str, float]:
    """CPU seconds of the merge for each folder, before and after the end of its input."""
    folders = finished(output / "shards")
    staged = output / "cells.partial"
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Merge(output, writes_tables=False) as merge:
        times = Path(f"/proc/{merge.process.pid}/schedstat")
        while not staged.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        start = int(times.read_text().split()[0]) / 1e9
        for folder in folders:
            merge.add(folder)
        while merge.process.poll() is None and len(list(staged.glob("*.h5"))) < len(folders):
            time.sleep(0.1)
        arrival = int(times.read_text().split()[0]) / 1e9
        merge.finish()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime
    return {"arrival": (arrival - start) / len(folders), "merge": (seconds - arrival) / len(folders)}


def measure_results(traces: list[str], output: Path) -> dict[str, float]:
    """Seconds by what they are for, of the results of these traces."""
    (output / "shards").mkdir(parents=True)
    plan = planned([*traces, *PLAN, "-o", str(output)])
    whole: list[Outcome] = []
    groups: list[Outcome] = []
    joined: list[Outcome] = []
    for trace in plan.left:
        of_one = replace(plan, traces=(trace,))
        [task], [*two, join] = (of_one.tasks(output, workers, Allowance(1, None), ()) for workers in (1, 2))
        whole.append(task.call())
        groups += (halves := [half.call() for half in two])
        joined.append(join.call(*(half.folder for half in halves)))
    assert all(outcome.ok for outcome in whole + groups + joined)
    seconds = [sum(outcome.seconds for outcome in outcomes) for outcomes in (whole, groups, joined)]
    folders = [outcome.folder for outcome in whole]
    begin = time.monotonic()
    copied = 0
    for name in TABLES:
        [part] = parts(output / f"{name}.partial", [Path(folder) / name for folder in folders], 1)
        part()
        copied += Path(part.table).stat().st_size
    return {
        "copy": (time.monotonic() - begin) / copied * 1e6,
        "tables": copied / len(whole) / 1e6,
        "group": seconds[1] / seconds[0] - 1,
        "join": seconds[2] / len(joined),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("traces", nargs="*")
    options.add_argument("--tasks", type=int, default=200)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        found = measure(asked.tasks, asked.workers, Path(folder))
        if asked.traces:
            found |= measure_results(asked.traces, Path(folder) / "results")
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        unit = UNITS.get(name)
        print(f"{name:12}{value:10.3f} {unit}" if unit else f"{name:12}{1000 * value:10.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
