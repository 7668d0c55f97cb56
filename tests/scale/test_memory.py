"""Does memory grow with the length of the prompt and not with its square?

One layer here, for time: layers stream one by one. docs/measurements.md has four.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

KVREPLAY = os.environ.get("KVREPLAY", str(Path(__file__).resolve().parents[2] / "build/release/kvreplay"))
SHAPE = "--layers 1 --query-heads 32 --kv-heads 8 --head-dim 128 --prompt 32768 --continuation 32".split()
ASKED = ["-p", "h2o", "-b", "0.1", "--threads", "2"]
LIMIT_KB = 300_000


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory) -> Path:
    """32,768 tokens, 32/8 heads of 128, float16: 0.4 GB."""
    path = tmp_path_factory.mktemp("scale") / "long.h5"
    subprocess.run([KVREPLAY, "synth", "gaussian", *SHAPE, "-o", path], check=True, capture_output=True)
    yield path
    path.unlink()


def anonymous_kb(pid: int) -> int:
    """Anonymous resident memory of a process; pages of mapped files do not count."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(lines[0].split()[1]) if lines else 0


def test_h2o_at_32768_tokens_stays_under_300_mb_as_the_plan_says(long_trace, tmp_path):
    command = [KVREPLAY, "replay", long_trace, *ASKED, "-o", tmp_path / "run"]
    planned = json.loads(subprocess.run([*command, "--dry-run", "--json"], check=True, capture_output=True).stdout)
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_kb(process.pid))
            time.sleep(0.02)
        assert process.returncode == 0, process.stderr.read()
    assert peak < LIMIT_KB
    assert 0.5 < planned["memory_bytes"] / (peak * 1024) < 2.0
