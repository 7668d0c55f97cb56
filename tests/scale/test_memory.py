"""Does memory grow with the length of the prompt and not with its square, and not with the trace?

One layer here, for time: layers stream one by one.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

KVREPLAY = os.environ.get("KVREPLAY", str(Path(__file__).resolve().parents[2] / "build/release/kvreplay"))
SHAPE = "--layers 1 --query-heads 8 --kv-heads 2 --head-dim 128 --prompt 32768 --continuation 32".split()
ASKED = ["-p", "h2o", "-b", "0.1", "--threads", "2"]
LIMIT_KB = 150_000


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory) -> Path:
    """32,768 tokens, 8/2 heads of 128, float16: 0.1 GB. An n x n matrix of one head would take 4 GiB."""
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


def test_h2o_at_32768_tokens_stays_under_150_mb_as_the_plan_says(long_trace, tmp_path):
    command = [KVREPLAY, "replay", long_trace, *ASKED, "-o", tmp_path / "run"]
    planned = json.loads(subprocess.run([*command, "--dry-run", "--json"], check=True, capture_output=True).stdout)
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_kb(process.pid))
            time.sleep(0.02)
        assert process.returncode == 0, process.stderr.read()
    assert peak < LIMIT_KB, peak
    assert 0.5 < planned["memory_bytes"] / (peak * 1024) < 2.0


@pytest.fixture(scope="module")
def trace_beyond_memory(tmp_path_factory) -> Path:
    """40 layers of 12 MB: several times the memory that the run gets."""
    path = tmp_path_factory.mktemp("scale") / "beyond.h5"
    shape = "--layers 40 --query-heads 8 --kv-heads 2 --head-dim 128 --prompt 4000 --continuation 8".split()
    subprocess.run([KVREPLAY, "synth", "gaussian", *shape, "-o", path], check=True, capture_output=True)
    yield path
    path.unlink()


def resident_kb(pid: int) -> int:
    """All resident memory of a process, pages of mapped files included."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon", "RssFile")))


def peak_of(command: list[str | Path]) -> int:
    """Peak resident memory in bytes of a command that must succeed."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, resident_kb(process.pid))
            time.sleep(0.005)
        assert process.returncode == 0, process.stderr.read()
    return peak * 1024


def test_a_trace_of_three_times_the_memory_replays_within_it(trace_beyond_memory, tmp_path):
    limit = trace_beyond_memory.stat().st_size // 3
    words = [KVREPLAY, "replay", trace_beyond_memory, "-p", "snapkv", "-b", "0.1", "--metrics", "attention_recall"]
    assert peak_of([*words, "--memory", str(limit), "-o", tmp_path / "limited"]) < limit
    subprocess.run([*words, "-o", tmp_path / "free"], check=True, capture_output=True)
    results = [(tmp_path / name / "results.csv").read_bytes() for name in ("limited", "free")]
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def trace_of_a_large_layer(tmp_path_factory) -> Path:
    """A layer of 256 MiB, nearly all of it keys and values."""
    path = tmp_path_factory.mktemp("scale") / "large.h5"
    shape = "--layers 1 --query-heads 4 --kv-heads 4 --head-dim 128 --prompt 131072 --continuation 8".split()
    subprocess.run(
        [KVREPLAY, "synth", "gaussian", *shape, "--queries", "last:64", "-o", path], check=True, capture_output=True
    )
    yield path
    path.unlink()


def test_a_layer_larger_than_the_memory_is_mapped_in_pieces(trace_of_a_large_layer, tmp_path):
    words = [KVREPLAY, "replay", trace_of_a_large_layer, "-p", "snapkv", "-b", "0.1", "--threads", "1"]
    words += ["--metrics", "attention_recall"]
    plan = [*words, "--dry-run", "--json", "-o", tmp_path / "plan"]
    planned = json.loads(subprocess.run(plan, check=True, capture_output=True).stdout)
    limit = planned["memory_bytes"] + (129 << 20)
    free = peak_of([*words, "-o", tmp_path / "free"])
    limited = peak_of([*words, "--memory", str(limit), "-o", tmp_path / "limited"])
    assert limited < limit
    assert limited < free - (64 << 20)
    results = [(tmp_path / name / "results.csv").read_bytes() for name in ("limited", "free")]
    assert results[0] == results[1]


@pytest.fixture(scope="module")
def longest_trace(tmp_path_factory) -> Path:
    """131,072 tokens, 2/1 heads of 64, the last 64 queries: 34 MB."""
    path = tmp_path_factory.mktemp("scale") / "longest.h5"
    shape = "--layers 1 --query-heads 2 --kv-heads 1 --head-dim 64 --prompt 131072 --continuation 32".split()
    subprocess.run(
        [KVREPLAY, "synth", "gaussian", *shape, "--queries", "last:64", "-o", path], check=True, capture_output=True
    )
    yield path
    path.unlink()


def test_131072_tokens_replay_from_their_last_queries(longest_trace, tmp_path):
    policies = "snapkv,pyramid-kv,chunkkv,dynamickv,streaming-llm,strided"
    words = [KVREPLAY, "replay", longest_trace, "-b", "0.1", "--metrics", "attention_recall", "--threads", "2"]
    command = [*words, "-p", policies, "-o", tmp_path / "run"]
    planned = json.loads(subprocess.run([*command, "--dry-run", "--json"], check=True, capture_output=True).stdout)
    assert peak_of(command) < planned["memory_bytes"] + planned["mapped_bytes"]
    refused = subprocess.run([*words, "-p", "h2o", "-o", tmp_path / "no"], capture_output=True, text=True)
    assert refused.returncode == 3
    assert "missing stored queries for h2o: expected queries 0..131071" in refused.stderr


def test_many_traces_do_not_stay_open_together(tmp_path):
    shape = "--layers 1 --query-heads 1 --kv-heads 1 --head-dim 4 --prompt 12 --continuation 4".split()
    names = [f"t{number}.h5" for number in range(300)]
    for number, name in enumerate(names):
        subprocess.run(
            [KVREPLAY, "synth", "gaussian", *shape, "--seed", str(number), "-o", name],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
    words = f"ulimit -n 290; exec {KVREPLAY} replay {' '.join(names)} -p h2o -b 8 --controls none -o out"
    subprocess.run(["bash", "-c", words], cwd=tmp_path, check=True, capture_output=True)
    assert len(list((tmp_path / "out/cells").glob("*.h5"))) == len(names)
