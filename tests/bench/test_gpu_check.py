"""What travels to a machine with a GPU: the page of its figures, and the script's refusals."""

import json
import subprocess
import sys
from pathlib import Path

import gpu_page
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu-check"
BEGUN = {
    "date": "2026-01-02",
    "command": "gpu-check run PART",
    "device": "A Device",
    "capability": "9.0",
    "driver": "13.0",
    "runtime": "13.0",
    "commit": "0123456789ab",
}


def observable(name: str, shape: tuple[int, int, int], tokens: int, dtype: str, **more) -> dict:
    case = f"{name}/{shape[0]}-{shape[1]}-{shape[2]}/n:{tokens}/{dtype}"
    line = {"case": case, "observable": name, "dim": shape[2], "tokens": tokens, "dtype": dtype, "level": ""}
    rest = {"error": 2e-7, "spread": 0.1, "seconds_with_copies": 0.5, "operations": 0, "bytes": 0, "problem": ""}
    return {**line, **rest, **more}


def replayed(device: str, seconds: float, layers: int) -> dict:
    return {
        "replay": "thirteen",
        "device_used": device,
        "shape": "32/8 heads",
        "layers": layers,
        "trace_bytes": 4e9 * layers / 32,
        "operations": 4e14 * layers / 32,
        "seconds": seconds,
    }


FORM = {"query_heads": 32, "kv_heads": 8, "dim": 128, "tokens": 32768, "dtype": "bfloat16"}
FOUND = {
    "suites": [
        {"suites": "warp-groups", "tests": 90, "seconds": 12.0, "failed": [], "problem": ""},
        {"suites": "warps", "tests": 90, "seconds": 2.0, "failed": ["A.b"], "problem": "A.b"},
    ],
    "parity": [
        {"trace": "t-float32", "policies": ["h2o", "snapkv"], "budgets": "0.1,0.5", "differences": 3, "of_two_runs": 0}
        | {"differing": {"h2o": 3}, "problem": "3 differences"},
    ],
    "sanitizer": [
        {"tool": "memcheck", "tests": 30, "summary": "ERROR SUMMARY: 0 errors", "seconds": 60.0, "problem": ""},
        {"tool": "racecheck", "skipped": "compute-sanitizer is not installed"},
    ],
    "observables": [
        {"case": "products/warp-groups/bfloat16", "rate": 600e12, "problem": ""},
        {"case": "products/warps/bfloat16", "rate": 2e15, "problem": "wrong numbers"},
        {"case": "copies/device", "rate": 4e12, "problem": ""},
        {"case": "copies/to_device", "rate": 50e9, "problem": ""},
        # 0.42e15 in a second are 52.5 % of 800e12.
        observable("cumulative_attention", (32, 8, 128), 32768, "bfloat16", seconds=1.0, operations=0.42e15),
        # 0.24e15 are 30 %.
        observable("cumulative_attention", (9, 3, 64), 32768, "bfloat16", seconds=1.0, operations=0.24e15),
        # 1e12 a second are a quarter of 4e12.
        observable("window_attention", (32, 8, 128), 32768, "bfloat16", seconds=1e-3, bytes=1e9),
        {"case": "least_redundant/32-8-128/n:8192/bfloat16", "level": "", "problem": "CUDA: cudaMalloc: out of memory"},
        observable("online_eviction", (32, 8, 128), 8192, "bfloat16", seconds=1.0, problem="not what the CPU says"),
    ],
    # Copies take 0.08 s, products 0.5 s.
    "replay": [replayed("cuda", 0.9, 32), replayed("cpu", 10.0, 2)],
    "pytorch": [
        {"product": "torch/bfloat16", "rate": 800e12},
        {"product": "torch/float32", "rate": 900e12},
        {"form": gpu_page.EAGER, "out_of_memory": "CUDA out of memory", **FORM},
        {"form": gpu_page.HEAD_BY_HEAD, "seconds": 0.5, "peak_bytes": 2**34, **FORM},
        {"form": gpu_page.SNAPKV, "seconds": 0.01, "peak_bytes": 2**30, **FORM},
    ],
}


@pytest.fixture
def results(tmp_path):
    for part, lines in FOUND.items():
        text = "".join(json.dumps(line) + "\n" for line in [{"part": part, **BEGUN}, *lines])
        (tmp_path / f"{part}.jsonl").write_text(text)
    return tmp_path


def row(text: str, *starts: str) -> str:
    rows = [line for line in text.splitlines() if line.startswith("| " + " | ".join(starts) + " |")]
    assert len(rows) == 1, (starts, rows)
    return rows[0]


def test_what_nobody_measured_says_so():
    text = gpu_page.page({})
    tables = text.split("\n## ")
    goals = tables[0].splitlines()[4:]
    assert len(goals) == len(gpu_page.WANTED) + 2
    assert all(line.endswith(f"| {gpu_page.MISSING} |") for line in goals)
    assert len(tables) == 8
    assert all(gpu_page.MISSING in table for table in tables)


def test_a_page_has_shares_of_what_was_measured_in_bold_where_they_miss(results):
    text = gpu_page.page(gpu_page.read(results))
    goals = text.split("\n## ")[0]
    assert row(goals, "`cumulative_attention/32-8-128/n:32768/bfloat16`").endswith("| 52.5 % of products |")
    assert row(goals, "`cumulative_attention/9-3-64/n:32768/bfloat16`").endswith("| **30 % of products** |")
    assert row(goals, "`cumulative_attention/9-3-64/n:32768/float16`").endswith(f"| {gpu_page.MISSING} |")
    assert row(goals, "`window_attention/32-8-128/n:32768/bfloat16`").endswith("| **25 % of copying** |")
    assert row(goals, "whole replay of 32 layers, 32/8 heads, 3.7 GiB").endswith("| 1.8 x the bound |")
    assert row(goals, "H2O and SnapKV by PyTorch over the whole replay").endswith("| 18.1 x |")
    assert "A Device (9.0)" in text and "2026-01-02" in text and "commit 0123456789ab" in text


def test_a_page_tells_what_was_wrong_or_left_out(results):
    text = gpu_page.page(gpu_page.read(results))
    assert "**A.b**" in row(text, "warps", "90 in 2 s")
    assert row(text, "t-float32").endswith("| **3**: h2o 3 | the same bits |")
    assert "not installed" in row(text, "racecheck")
    assert "**wrong numbers**" in row(text, "products/warps/bfloat16")
    assert "**not what the CPU says**" in row(text, "`online_eviction/32-8-128/n:8192/bfloat16`")
    assert "**CUDA: cudaMalloc: out of memory**" in row(text, "`least_redundant/32-8-128/n:8192/bfloat16`")
    assert "out of memory" in row(text, f"{gpu_page.EAGER}; 32/8 heads, d = 128, 32,768 tokens, bfloat16")
    assert f'"{gpu_page.EAGER}" did not fit' in text
    assert "160 s (10 s for 2 layers, scaled) | 178 x" in text


def test_the_document_gets_its_generated_part_anew(results, tmp_path):
    document = tmp_path / "gpu.md"
    document.write_text((ROOT / "docs" / "gpu.md").read_text())
    for _ in range(2):
        assert subprocess.run([sys.executable, gpu_page.__file__, results, document]).returncode == 0
        text = document.read_text()
        assert text.count("52.5 % of products") == 2  # the goal and the case
        assert text.startswith("# On a GPU") and text.endswith(gpu_page.page(gpu_page.read(results)) + "<!-- end -->\n")


def test_a_folder_that_is_not_packed_and_a_part_that_is_none_are_refused(tmp_path):
    for words, said in (([tmp_path], "not what `gpu-check pack` made"), ([tmp_path, "speed"], "unknown part 'speed'")):
        done = subprocess.run([sys.executable, SCRIPT, "run", *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr


def test_without_a_device_nothing_is_measured(tmp_path):
    (tmp_path / "packed.json").write_text("{}")
    program = tmp_path / "device_observables"
    program.write_text("#!/bin/sh\necho 'CUDA: no device: found cudaErrorNoDevice' >&2\nexit 4\n")
    program.chmod(0o755)
    out = tmp_path / "out"
    command = [sys.executable, SCRIPT, "run", tmp_path, "parity", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4
    assert "cudaErrorNoDevice" in done.stderr
    assert not out.exists()
