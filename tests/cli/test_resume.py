"""Finished work is never done twice, interrupted work goes on, and the results are the same whatever happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import h5py
import pytest
from program import done, kvreplay, start

POLICIES = ["-p", "snapkv,h2o,chunkkv", "-b", "0.1,0.2"]


def states(output: Path) -> set[str]:
    return {cell["state"] for cell in json.loads((output / "run.json").read_text())["cells"]}


def test_a_second_run_computes_nothing(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "long.h5", *POLICIES, "-o", "out"]
    done(*words, folder=tmp_path)
    cells = tmp_path / "out/cells/long.h5"
    before = cells.stat()
    results = (tmp_path / "out/results.csv").read_bytes()
    assert states(tmp_path / "out") == {"done"}
    again = json.loads(done(*words, "--json", folder=tmp_path))
    assert {cell["state"] for cell in again["cells"]} == {"skipped"}
    assert (cells.stat().st_mtime_ns, cells.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert (tmp_path / "out/results.csv").read_bytes() == results


def test_the_record_names_the_inputs_of_earlier_calls(tmp_path: Path) -> None:
    for name in ("first", "second", "first"):
        synth = ("synth", "gaussian", "-o", f"{name}.h5", "--prompt", "24", "--continuation", "2", "--force")
        kvreplay(*synth, folder=tmp_path)
        kvreplay("replay", f"{name}.h5", "-p", "local", "-b", "8", "-o", "run", folder=tmp_path)
    inputs = json.loads((tmp_path / "run/run.json").read_text())["inputs"]
    assert [(one["trace"], one["path"]) for one in inputs] == [("first", "first.h5"), ("second", "second.h5")]
    assert inputs[0]["prompt_hash"] == inputs[1]["prompt_hash"] != ""


def test_force_computes_again(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-p", "h2o", "-b", "6", "-o", "out"]
    done(*words, folder=tmp_path)
    again = json.loads(done(*words, "--force", "--json", folder=tmp_path))
    assert {cell["state"] for cell in again["cells"]} == {"done"}


def test_an_added_metric_adds_itself_alone(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-p", "h2o", "-b", "6"]
    done(*words, "--metrics", "kv_l1_loss", "-o", "out", folder=tmp_path)
    few = (tmp_path / "out/results.csv").read_text().splitlines()
    done(*words, "--metrics", "kv_l1_loss,kv_bytes", "-o", "out", folder=tmp_path)
    more = (tmp_path / "out/results.csv").read_text().splitlines()
    assert set(few) < set(more)
    column = more[0].split(",").index("metric")
    assert all(",kv_bytes," in row for row in set(more) - set(few)) and column > 0
    done(*words, "--metrics", "kv_l1_loss,kv_bytes", "-o", "fresh", folder=tmp_path)
    assert done("diff", "out", "fresh", folder=tmp_path) == "equal\n"


def test_an_added_policy_leaves_the_others_alone(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-b", "6", "-o", "out", "--json"]
    done(*words, "-p", "h2o", folder=tmp_path)
    cells = json.loads(done(*words, "-p", "h2o,snapkv:window=2", folder=tmp_path))["cells"]
    assert {cell["policy"] for cell in cells if cell["state"] == "done"} == {"snapkv"}
    assert {cell["policy"] for cell in cells if cell["state"] == "skipped"} == {"h2o", "full", "random", "oracle"}


def test_twins_that_join_later_are_those_of_one_run(traces: Path, tmp_path: Path) -> None:
    words = ["replay", traces / "fixture.h5", "-b", "6", "-p", "h2o,chunkkv:window=2,chunk=3,reuse=2", "--json"]
    twins = {"random-twin:of=h2o", "random-twin:of=(chunkkv:chunk=3,window=2,reuse=2)"}
    whole = json.loads(done(*words, "--controls", "twins", "-o", "whole", folder=tmp_path))
    assert {cell["label"] for cell in whole["cells"] if cell["policy"] == "random-twin"} == twins
    done(*words, "--controls", "none", "-o", "out", folder=tmp_path)
    for controls, new in (("random", {"full", "random", "oracle"}), ("twins", twins)):
        cells = json.loads(done(*words, "--controls", controls, "-o", "out", folder=tmp_path))["cells"]
        assert {cell["label"] for cell in cells if cell["state"] == "done"} == new
    assert (tmp_path / "out/results.csv").read_bytes() == (tmp_path / "whole/results.csv").read_bytes()
    assert done("diff", "out", "whole", folder=tmp_path) == "equal\n"
    # A run without controls leaves those of the folder as they are.
    cells = json.loads(done(*words, "--controls", "none", "-o", "out", folder=tmp_path))["cells"]
    assert {cell["state"] for cell in cells} == {"skipped"} and len(cells) == 2
    assert (tmp_path / "out/results.csv").read_bytes() == (tmp_path / "whole/results.csv").read_bytes()


def test_results_are_the_same_for_any_number_of_threads(traces: Path, tmp_path: Path) -> None:
    for threads in "123":
        done("replay", traces / "long.h5", *POLICIES, "--threads", threads, "-o", threads, folder=tmp_path)
    for threads in "23":
        assert done("diff", "1", threads, folder=tmp_path) == "equal\n"
        assert (tmp_path / "1/results.csv").read_bytes() == (tmp_path / threads / "results.csv").read_bytes()


def several(folder: Path, n: int) -> list[str]:
    """n traces that each take a while."""
    shape = "--layers 12 --prompt 512 --continuation 32 --head-dim 32".split()
    names = [f"trace{i}.h5" for i in range(n)]
    for seed, name in enumerate(names):
        done("synth", "sinks", "-o", name, *shape, "--seed", str(seed), folder=folder)
    return names


def wait_for_first_trace(output: Path, process: subprocess.Popen[str]) -> None:
    """Until one trace is finished and the others are not."""
    deadline = time.monotonic() + 120
    while not list(output.glob("cells/*.h5")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda blow: blow.name)
def test_a_stopped_replay_leaves_whole_files_and_goes_on(blow: signal.Signals, tmp_path: Path) -> None:
    names = several(tmp_path, 3)
    words = ["replay", *names, *POLICIES]
    process = start(*words, "-o", "out", folder=tmp_path)
    wait_for_first_trace(tmp_path / "out", process)
    process.send_signal(blow)
    _, err = process.communicate(timeout=120)
    if blow == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert err.startswith("kvreplay: ") and "interrupted" in err

    files = sorted((tmp_path / "out/cells").glob("*.h5"))
    assert 1 <= len(files) < len(names)
    for path in files:
        with h5py.File(path) as file:
            assert len(file) > 0
    if blow == signal.SIGKILL:
        for whole in ("results.csv", "run.json"):
            assert not (tmp_path / "out" / whole).exists()

    finished = {path: path.stat().st_mtime_ns for path in files}
    done(*words, "-o", "out", folder=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in files} == finished
    assert not list((tmp_path / "out").rglob("*.partial"))
    done(*words, "-o", "fresh", folder=tmp_path)
    assert done("diff", "out", "fresh", folder=tmp_path) == "equal\n"
    assert (tmp_path / "out/results.csv").read_bytes() == (tmp_path / "fresh/results.csv").read_bytes()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_refused(traces: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    answer = kvreplay("replay", traces / "fixture.h5", "-p", "h2o", "-b", "6", "-o", closed / "out", folder=tmp_path)
    told = f"kvreplay: {closed}/out: cannot be created: expected a folder for results, found Permission denied\n"
    assert (answer.code, answer.err) == (2, told)
