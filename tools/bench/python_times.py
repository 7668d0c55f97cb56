"""What a policy in Python costs: from saving its file to its new row and figure, and beside its twin in C++.

python tools/bench/python_times.py prints the table of docs/python.md. Both run on an otherwise idle machine.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kvreplay as kv

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "traces" / "smollm2-135m-needle.h5"
POLICY = ROOT / "docs" / "value_attention.py"
EDITS = 7
SHAPE = "--layers 4 --query-heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16 --continuation 32"


@kv.policy(recent="window")
def twin(view, window: int = 8):
    """snapkv:pool=none, in Python"""
    return view.window_attention(window)


def after_saving(folder: Path) -> tuple[float, float]:
    """Median seconds from saving an edited policy to its row, and to the figure drawn anew."""
    mine, log = folder / "mine.py", folder / "log"
    shutil.copy(POLICY, mine)
    shutil.copy(TRACE, folder / "trace.h5")
    words = "replay trace.h5 -p mine.py:value_attention,snapkv,h2o -b 0.1,0.2,0.3 -o run --watch --figure curve=c.svg"
    rows, figures = [], []
    with log.open("w") as output:
        watching = subprocess.Popen(["kvreplay", *words.split()], cwd=folder, stdout=output, stderr=output)
        try:
            for edit in range(EDITS + 1):
                start = time.monotonic()
                if edit:
                    mine.write_text(f"{POLICY.read_text()}# edit {edit}\n")
                while log.read_text().count("self-check") <= edit:
                    time.sleep(0.002)
                rows.append(time.monotonic() - start)
                while log.read_text().count("; watching") <= edit:
                    time.sleep(0.002)
                figures.append(time.monotonic() - start)
        finally:
            watching.terminate()
            watching.wait()
    return statistics.median(rows[1:]), statistics.median(figures[1:])


def choosing(trace: Path) -> tuple[float, float]:
    """Seconds of scoring and selecting, shared observables apart, all layers: the twin in Python, and in C++."""
    run = kv.replay(trace, [twin, "snapkv:pool=none"], 0.1, metrics="attention_recall", progress=False)
    seconds = {row.policy: run.select_seconds[row.trace, row.cell] for row in run.cells.itertuples()}
    left, right = run.selection("twin", 0.1), run.selection("snapkv", 0.1)
    assert (left.positions == right.positions).all() and (left.offsets == right.offsets).all()
    return seconds["twin"], seconds["snapkv"]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row, figure = after_saving(folder)
        print("| what | seconds |\n| --- | --- |")
        print(f"| from saving the file to its new row, shipped trace, three policies, three budgets | {row:.2f} |")
        print(f"| ... and to the figure | {figure:.2f} |")
        for prompt in (1024, 16384):
            trace = folder / f"{prompt}.h5"
            synth = ["kvreplay", "synth", "gaussian", *SHAPE.split(), "--prompt", str(prompt), "-o", trace]
            subprocess.run(synth, check=True, stdout=subprocess.DEVNULL)
            python, compiled = choosing(trace)
            print(f"| `snapkv:pool=none`, 4 layers, 32/8 heads, {prompt:,} tokens, in Python | {python:.4f} |")
            print(f"| ... in C++ | {compiled:.4f} |")
            trace.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
