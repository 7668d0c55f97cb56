"""Whole replays, timed as a user sees them: the program from start to end, on a trace in the page cache."""

from __future__ import annotations

import csv
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
    metrics: str = METRICS

    def command(self, trace: str) -> str:
        return f"kvreplay replay {trace} -p {self.policies} -b {self.budgets} --metrics {self.metrics}"


ALONE = Replay("h2o alone at one budget", "h2o", "0.1")
ALL = Replay("thirteen policies at five budgets")
ADDITIONS = [
    Replay("... and output metrics", metrics=f"{METRICS},output_cosine,output_error"),
    Replay("... and redundancy", metrics=f"{METRICS},redundancy_key,redundancy_value"),
    Replay("... and pyramid-infer", f"{POLICIES},pyramid-infer"),
    Replay("... and sca", f"{POLICIES},sca"),
    Replay("... and kivi", f"{POLICIES},kivi"),
]


def seconds_of(program: Path, replay: Replay, trace: Path, folder: Path) -> tuple[float, float]:
    """Seconds of one run, and those that scoring and selecting took of them."""
    words = replay.command(str(trace)).split()[1:]
    begin = time.perf_counter()
    command = [program, *words, "--force", "--progress", "never", "-o", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - begin
    with open(folder / "seconds.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "select_seconds" and not row["variant"]]
    return whole, sum(float(row["value"]) for row in rows)


def measure(program: Path, trace: Path, folder: Path, quick: bool) -> list[dict]:
    """Median seconds of each replay; the first two take turns, since their ratio counts."""
    replays = [ALONE, ALL] if quick else [ALONE, ALL, *ADDITIONS]
    times: dict[str, list[tuple[float, float]]] = {replay.name: [] for replay in replays}
    trace.read_bytes()  # into the page cache
    for turn in range(1 if quick else 3):
        for replay in replays[:2] if turn else replays:
            times[replay.name].append(seconds_of(program, replay, trace, folder))
            print(f"{replay.name}: {times[replay.name][-1][0]:.2f} s")
    return [
        {
            **asdict(replay),
            "seconds": median(whole for whole, _ in times[replay.name]),
            "select_seconds": median(select for _, select in times[replay.name]),
        }
        for replay in replays
    ]
