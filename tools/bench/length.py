"""What each policy adds to a replay as traces, budgets and layers grow, and replays of a million tokens."""

from __future__ import annotations

import math
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from statistics import linear_regression
from typing import Any

from replay_times import BUDGETS, Replay, Time, every_policy, seconds_of

LENGTHS = (2048, 4096, 8192, 16384)  # tokens
LONG, QUADRATIC = 1_048_576, 131_072
LAYERS = 2
CONTINUATION = 64
LEAST = 0.05  # seconds: less is the noise of a replay
LINEAR = 1.3  # the largest exponent of what is replayed at LONG tokens


def trace(program: Path, folder: Path, tokens: int, layers: int = LAYERS) -> Path:
    """Synthetic, made once: 4 query heads that read 1 KV head, d = 128."""
    path = folder / f"sinks-4-1-128-{layers}-{tokens}.h5"
    if not path.exists():
        shape = f"--layers {layers} --query-heads 4 --kv-heads 1 --head-dim 128 --dtype bfloat16"
        size = f"--prompt {tokens - CONTINUATION} --continuation {CONTINUATION}"
        subprocess.run([program, "synth", "sinks", *shape.split(), *size.split(), "-o", path, "-q"], check=True)
    return path


def replay(program: Path, path: Path, policies: str, budgets: str = "0.1", threads: int | None = 1) -> Time:
    asked = Replay(policies, policies, budgets, "attention_recall")
    folder = path.parent / "replayed"
    options = ["--controls", "none"] + (["--threads", str(threads)] if threads else [])
    try:
        return seconds_of(program, asked, path, folder, *options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def added(program: Path, path: Path, policy: str, budgets: str, base: float) -> float:
    """Processor seconds on one thread beyond the replay of `full`: the smaller of two."""
    times = [replay(program, path, policy, budgets).processor_seconds - base for _ in range(2)]
    return max(min(times), 0.0)


def exponent(lengths: tuple[int, ...], seconds: list[float]) -> float | None:
    """Slope of log seconds over log tokens (least squares) at the lengths that take LEAST seconds and more; None for
    fewer than two."""
    points = [(math.log(n), math.log(one)) for n, one in zip(lengths, seconds, strict=True) if one >= LEAST]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None


def of_policy(program: Path, policy: str, traces: list[Path], deeper: Path, bases: dict[Path, float]) -> dict[str, Any]:
    seconds = [added(program, path, policy, "0.1", bases[path]) for path in traces]
    found = {"policy": policy, "seconds": seconds, "exponent": exponent(LENGTHS, seconds)}
    if seconds[2] >= LEAST:
        found["of_five_budgets"] = added(program, traces[2], policy, BUDGETS, bases[traces[2]]) / seconds[2]
        found["of_twice_the_layers"] = added(program, deeper, policy, "0.1", bases[deeper]) / seconds[2]
    print(f"{policy}: {seconds[-1]:.2f} s, exponent {found['exponent']}", flush=True)
    return found


def measure(program: Path, folder: Path, quick: bool) -> dict[str, Any]:
    traces = [trace(program, folder, tokens) for tokens in LENGTHS]
    deeper = trace(program, folder, LENGTHS[2], 2 * LAYERS)
    fits, others = every_policy(program, traces[0])
    if quick:
        fits = ["h2o", "snapkv"]
    bases = {path: replay(program, path, "full").processor_seconds for path in [*traces, deeper]}
    rows = [of_policy(program, policy, traces, deeper, bases) for policy in fits if policy != "full"]
    if quick:
        return {"rows": rows, "rejected": others}
    linear = [row["policy"] for row in rows if (row["exponent"] or 0) <= LINEAR]
    long = []
    for tokens, policies in ((LONG, "full"), (LONG, ",".join(linear)), (QUADRATIC, "full"), (QUADRATIC, "h2o")):
        time = replay(program, trace(program, folder, tokens), policies, threads=None)
        print(f"{tokens:,} tokens, {policies}: {time.seconds:.1f} s", flush=True)
        long.append({"tokens": tokens, "policies": policies, **asdict(time)})
    return {"rows": rows, "rejected": others, "long": long}
