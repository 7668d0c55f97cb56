#!/usr/bin/env python3
"""Kills workers of a sweep at random, and its client once; the end must equal one replay, bit by bit.

    tests/sweep/kill_workers.py TRACE... [-p POLICY,...] [-b BUDGET,...] [--kills N] [--workers N] [--threads T]

Prints seconds of one process, of a sweep by one worker and by all of them, undisturbed, each with T threads a worker,
and what the kills cost. Exit code 1: a result was another one.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cli")]

from program import PROGRAM  # noqa: E402
from trial_sweeps import assert_equal, table  # noqa: E402

WORKER = b"multiprocessing.forkserver"  # Dask's nannies start one such process, and it starts the workers


def timed(command: list[str]) -> float:
    begin = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - begin


def children(of: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{of}/task").glob("*/children") for child in task.read_text().split()]


def workers(client: int) -> list[int]:
    def words(process: int) -> bytes:
        try:
            return Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            return b""

    servers = [process for process in children(client) if WORKER in words(process)]
    return [worker for server in servers for worker in children(server)]


def begun(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def disturbed(command: list[str], output: Path, kills: int, lasts: float, chance: random.Random) -> Counter:
    """Begun, killed and gone on with until all kills are spent and the sweep is done."""
    done: Counter = Counter()
    client = begun(command)
    client_dies_after = chance.randrange(kills)
    while client.poll() is None:
        try:
            client.wait(chance.uniform(0, 2 * lasts / kills))
            break
        except subprocess.TimeoutExpired:
            pass
        if done["client"] == 0 and done["workers"] >= client_dies_after and list(output.glob("shards/*/run.json")):
            client.kill()
            client.wait()
            done["client"] += 1
            client = begun(command)
        elif done["workers"] < kills and (alive := workers(client.pid)):
            try:
                os.kill(chance.choice(alive), signal.SIGKILL)
            except ProcessLookupError:
                continue
            done["workers"] += 1
    if client.wait() != 0:
        raise AssertionError(f"exit code {client.returncode}: {client.stderr.read()}")
    return done


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("traces", nargs="+", type=Path)
    options.add_argument("-p", default="snapkv,h2o,chunkkv,local,streaming-llm")
    options.add_argument("-b", default="0.05,0.1,0.2")
    options.add_argument("--kills", type=int, default=12)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    traces = [str(path.resolve()) for path in asked.traces]
    replay = [*traces, "-p", asked.p, "-b", asked.b, "--threads", str(asked.threads)]
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        single, swept = Path(scratch) / "single", Path(scratch) / "swept"

        def sweep(count: int) -> list[str]:
            return [sys.executable, "-m", "kvreplay.sweep.command", *replay, "-o", str(swept), "--workers", str(count),
                    "--retries", "20"]  # fmt: skip

        print(f"one process: {timed([str(PROGRAM), 'replay', *replay, '-o', str(single)]):.1f} s", flush=True)
        took = {}
        for count in (1, asked.workers):
            took[count] = timed(sweep(count))
            assert_equal(swept, single)
            shutil.rmtree(swept)
            print(f"a sweep, {count} workers: {took[count]:.1f} s, equal", flush=True)
        print(f"speed-up of {asked.workers} workers over one: {took[1] / took[asked.workers]:.2f}", flush=True)
        begin = time.monotonic()
        try:
            done = disturbed(sweep(asked.workers), swept, asked.kills, took[asked.workers], random.Random(asked.seed))
            assert_equal(swept, single)
        except AssertionError as difference:
            print(f"WRONG: {difference}")
            return 1
        attempts = sum(int(row["attempts"]) for row in table(swept).values())
        print(f"{done['workers']} workers and {done['client']} client killed: {time.monotonic() - begin:.1f} s, equal; "
              f"{attempts} attempts at {len(traces)} tasks")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
