"""Whole replays, timed as a user sees them: the program from start to end, on a trace in the page cache."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

METRICS = "attention_recall,attention_cosine,attention_l1,kv_l1_loss,jaccard_matrix,layer_budget"
BUDGETS = "0.05,0.1,0.2,0.3,0.5"
# full, random and oracle are controls of every run.
POLICIES = "local,streaming-llm,strided,truncate,h2o,snapkv,pyramid-kv,chunkkv,hybrid,dynamickv"
LIVE_POLICIES = "local,streaming-llm,strided,truncate:keep_question=false,h2o,snapkv,pyramid-kv,chunkkv"


@dataclass(frozen=True)
class Replay:
    name: str
    policies: str = POLICIES
    budgets: str = BUDGETS
    metrics: str = METRICS  # none: the default ones

    def command(self, trace: str) -> str:
        metrics = f" --metrics {self.metrics}" if self.metrics else ""
        return f"kvreplay replay {trace} -p {self.policies} -b {self.budgets}{metrics} --observables ignore"


ALONE = Replay("h2o alone at one budget (with full, random and oracle, as in every run)", "h2o", "0.1")
ALL = Replay("thirteen policies at five budgets")
ADDITIONS = [
    Replay("... and output metrics", metrics=f"{METRICS},output_cosine,output_error"),
    Replay("... and redundancy", metrics=f"{METRICS},redundancy_key,redundancy_value"),
    Replay("... and pyramid-infer", f"{POLICIES},pyramid-infer"),
    Replay("... and sca", f"{POLICIES},sca"),
    *(
        Replay(f"... and {name}", f"{POLICIES},{name}")
        for name in ("kivi", "minicache", "think", "cam", "quest", "finch")
    ),
]


EVERY = "every policy at five budgets, default metrics"
# Policies without a default, as they are measured.
GIVEN = {
    "critical-kv": "critical-kv:wo=none",
    "dms": "dms:base=(knorm),threshold=-20",
    "random-twin": "random-twin:of=(snapkv)",
}


@dataclass(frozen=True)
class Time:
    seconds: float
    processor_seconds: float  # of all threads
    select_seconds: float  # of these, in selecting and sorting
    peak_bytes: int  # resident, pages of the trace included


def seconds_of(program: Path, replay: Replay, trace: Path, folder: Path, *options: str) -> Time:
    words = replay.command(str(trace)).split()[1:]
    shutil.rmtree(folder, ignore_errors=True)  # cells of another replay would be written and summed again
    begin = time.perf_counter()
    command = [program, *words, "--force", "--progress", "never", "-o", folder, *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    whole = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    with open(folder / "seconds.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "select_seconds" and row["variant"] == "select"]
    selecting = sum(float(row["value"]) for row in rows)
    return Time(whole, usage.ru_utime + usage.ru_stime, selecting, usage.ru_maxrss * 1024)


def in_turns(program: Path, trace: Path, folder: Path, runs: list[tuple[Replay, list[str]]], turns: int) -> list[dict]:
    """Medians over turns in which each run comes once."""
    with open(trace, "rb") as file:  # into the page cache; a child's peak counts what its parent once held
        while file.read(2**20):
            pass
    times: list[list[Time]] = [[] for _ in runs]
    for _ in range(turns):
        for (replay, options), of_run in zip(runs, times, strict=True):
            of_run.append(seconds_of(program, replay, trace, folder, *options))
            print(f"{replay.name}: {of_run[-1].seconds:.2f} s", flush=True)
    return [
        {
            **asdict(replay),
            "seconds": median(one.seconds for one in of_run),
            "processor_seconds": median(one.processor_seconds for one in of_run),
            "select_seconds": median(one.select_seconds for one in of_run),
            "peak_bytes": max(one.peak_bytes for one in of_run),
        }
        for (replay, _), of_run in zip(runs, times, strict=True)
    ]


def every_policy(program: Path, trace: Path) -> tuple[list[str], list[str]]:
    """Policies of the registry that replay the trace, as they are measured, and names of those that do not."""
    names = subprocess.run([program, "policies", "--names"], check=True, stdout=subprocess.PIPE, text=True).stdout
    fits, others = [], []
    for name in names.split():
        policy = GIVEN.get(name, name)
        asked = [program, "replay", trace, "-p", policy, "-b", "0.1", "--dry-run", "--force"]
        answer = subprocess.run(asked, capture_output=True)
        (others if answer.returncode else fits).append(name if answer.returncode else policy)
    return fits, others


def measure(program: Path, trace: Path, folder: Path, quick: bool) -> list[dict]:
    def times(replays: list[Replay], turns: int) -> list[dict]:
        return in_turns(program, trace, folder, [(replay, []) for replay in replays], 1 if quick else turns)

    # What has a goal is measured more often: single runs on a shared machine differ by a third.
    every = Replay(EVERY, ",".join(every_policy(program, trace)[0]), metrics="")
    return times([ALONE, ALL], 7) + times(ADDITIONS, 2) + times([every], 1)


MEMORY = 256  # MB
BEYOND = Replay("snapkv beyond memory", "snapkv", "0.1", "attention_recall")


def beyond_memory(program: Path, trace: Path, folder: Path, turns: int) -> dict:
    """A trace of three times the memory that a run may hold, and the same without a limit."""
    runs: list[tuple[Replay, list[str]]] = [(BEYOND, []), (BEYOND, ["--memory", f"{MEMORY}M"])]
    free, limited = in_turns(program, trace, folder, runs, turns)
    return {"trace_bytes": trace.stat().st_size, "free": free, "limited": limited}
