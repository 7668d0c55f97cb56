"""Two builds in turns: is the second as fast as the first?

    python tools/bench/compare_builds.py HEAD~1 build/release/kvreplay_bench
    python tools/bench/compare_builds.py A B --cases 'cumulative.*float32' --rounds 9 --fail-below 0.95

A and B are programs kvreplay_bench, or git revisions, which are built under build/compare. For each case: how many
times faster B is, the median over rounds and the range of its middle half. Both have checked their answers first. The
exit code is 1 only where --fail-below says so. For people, on a quiet machine; no test runs it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from timing_server import TimingServer, best_cases

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    r"(cumulative_attention/(9-3-64|32-8-128)/n:4096/(float32|bfloat16)|window_attention/32-8-128/n:32768/float16|"
    r"kept_moments/9-3-64/n:8192/bfloat16|similarity_row_maxima/8-8-128/n:4000/float32|"
    r"least_redundant/3-3-64/n:4000/float32|online_eviction/9-3-64/n:4096/bfloat16)/"
)


def program(name: str) -> Path:
    """The program itself, or that of a revision."""
    if Path(name).is_file():
        return Path(name).resolve()
    git = ["git", "rev-parse", "--short=12", "--verify", f"{name}^{{commit}}"]
    commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    folder = ROOT / "build" / "compare" / commit
    built = folder / "build" / "kvreplay_bench"
    if not built.exists():
        print(f"building {name} in {folder.relative_to(ROOT)}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVREPLAY_BENCHMARKS=ON", "-DKVREPLAY_TESTS=OFF"]
        quiet = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run(["cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", *options], **quiet)
        subprocess.run(["cmake", "--build", folder / "build", "--target", "kvreplay_bench"], **quiet)
    return built


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("a", metavar="A", help="a program kvreplay_bench or a git revision")
    options.add_argument("b", metavar="B", help="the same")
    options.add_argument("--cases", default=CASES, metavar="REGEX", help="of case names; the best level of each counts")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--fail-below", type=float, metavar="RATIO", help="exit 1 where B is slower than that")
    given = options.parse_args()
    slow = []
    with TimingServer(program(given.a)) as a, TimingServer(program(given.b)) as b:
        there = set(a.cases())
        for case in best_cases([name for name in b.cases() if name in there], given.cases):
            for server in (a, b):
                if problem := server.problem(case):
                    raise SystemExit(f"{case}: {problem}")
            calls = max(1, round(0.05 / max(a.seconds(case), 1e-6)))
            ratios = []
            for turn in range(given.rounds):
                order = (a, b) if turn % 2 == 0 else (b, a)
                seconds = {server: server.seconds(case, calls) for server in order}
                ratios.append(seconds[a] / seconds[b])
            low, ratio, high = np.quantile(ratios, [0.25, 0.5, 0.75])
            print(f"{ratio:6.3f}  [{low:.3f} {high:.3f}]  {case}", flush=True)
            if given.fail_below is not None and ratio < given.fail_below:
                slow.append(case)
    if slow:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
