"""Does the script of the table of published orders in docs/policies.md run, on small traces?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvreplay.engine import program

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_policies_has_the_command_of_its_table(tmp_path: Path) -> None:
    page = (ROOT / "docs/policies.md").read_text("utf-8")
    policies = re.search(r"^P=(.*)$", page, re.MULTILINE)[1]
    traces = [str(tmp_path / f"{seed}.h5") for seed in range(2)]
    for seed, trace in enumerate(traces):
        assert program(["synth", "needle", "--prompt", "320", "--seed", str(seed), "-o", trace]) == 0
    for name, more in {"own": [], "equal": ["--protect", "sinks=4,recent=8"]}.items():
        words = ["-p", policies, "-b", "0.3", "--controls", "twins", *more, "-o", str(tmp_path / name)]
        assert program(["replay", *traces, *words, "--progress", "never", "-q"]) == 0
    command = [sys.executable, ROOT / "docs/published_orders.py", tmp_path / "own", tmp_path / "equal"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    shown = re.findall(r"^\| ([^|]+) \| (`[^|]+) \|.* \|$", page.partition("## Published orders")[2], re.MULTILINE)
    assert [tuple(line[2:].split(" | ")[:2]) for line in printed[2:-2]] == shown
    assert printed[-1] == "2 traces; 64 tests."
    assert sum(line.count("not resolved") for line in printed) == 64  # two prompts have no small p
