"""Several threads may use kvreplay at once, and so may processes that are forked: docs/threads.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from program import done

THREADS_PAGE = Path(__file__).parents[2] / "docs" / "threads.md"
BEGIN = """
import multiprocessing, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import kvreplay as kv

def replay(path, **options):
    return str(kv.replay(path, "local", 0.3, progress=False, **options).results.value.to_list())
"""


def python(code: str, *arguments: object, seconds: float) -> subprocess.CompletedProcess:
    words = [sys.executable, "-c", BEGIN + code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)


def test_many_traces_on_four_threads(tmp_path: Path) -> None:
    """The child that walks a file is forked while other threads use HDF5. One that waits for their lock ends after 50
    seconds, and the file is walked again."""
    done("synth", "integer", "-o", "0.h5", "--layers", "1", "--prompt", "64", folder=tmp_path)
    for number in range(1, 24):
        shutil.copy(tmp_path / "0.h5", tmp_path / f"{number}.h5")
    code = """
traces = sorted(Path(sys.argv[1]).glob("*.h5"))
kv.replay  # the engine is imported once, before the threads begin
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda path: replay(path, threads=1), traces))
print(len(found), set(found) == {replay(traces[0])})
"""
    run = python(code, tmp_path, seconds=45)
    assert (run.stdout, run.stderr, run.returncode) == ("24 True\n", "", 0)


FORKED = """
expected = replay(sys.argv[1], threads=2)

def child(path, options):
    try:
        return replay(path, **options) == expected
    except kv.Error as error:
        return str(error)

with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
    print(*pool.starmap(child, [(sys.argv[1], eval(options)) for options in sys.argv[3:]]), sep="\\n")
"""


def test_a_forked_process_replays_on_one_thread(small: Path) -> None:
    """The threads of OpenMP are not in a child that is forked: a team that waits for them never begins."""
    run = python(FORKED, small, "fork", "{}", "{'threads': 1}", "{}", seconds=60)
    assert (run.stdout, run.stderr) == ("True\n" * 3, "")


def test_more_threads_in_a_forked_process_are_refused(small: Path) -> None:
    """The message is that of the page."""
    run = python(FORKED, small, "fork", "{'threads': 4}", seconds=60)
    assert run.stdout == (
        "--threads: a forked process cannot start more threads: expected threads=1, or multiprocessing with the "
        "spawn method, found 4\n"
    )
    assert f"```\n{run.stdout}```" in THREADS_PAGE.read_text()


def test_processes_that_are_forked_before_any_replay_have_all_threads(small: Path) -> None:
    code = """
with multiprocessing.get_context("fork").Pool(1) as pool:
    print(len(pool.apply(replay, [sys.argv[1]], {"threads": 2})) > 0)
"""
    run = python(code, small, seconds=60)
    assert (run.stdout, run.stderr) == ("True\n", "")


@pytest.mark.parametrize("call", ["replay(sys.argv[1])", "kv.open(sys.argv[1]).layer(0).cumulative_attention()"])
def test_a_daemon_thread_in_the_engine_when_python_ends(call: str, tmp_path: Path) -> None:
    """It needs the interpreter's lock to return, and may have it no more."""
    done(
        "synth",
        "gaussian",
        "-o",
        "long.h5",
        "--prompt",
        "12000",
        "--layers",
        "2",
        "--query-heads",
        "4",
        folder=tmp_path,
    )
    code = f"""
def work():
    while True:
        {call}

threading.Thread(target=work, daemon=True).start()
time.sleep(1)
"""
    run = python(code, tmp_path / "long.h5", seconds=60)
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 0)


def test_a_trace_in_memory_is_deleted_when_python_ends() -> None:
    code = """
import numpy as np
array = [np.zeros((1, 8, 4), np.float32)]
trace = kv.from_arrays(array, array, array, prompt=6)
print(trace.prompt)
"""
    run = python(code, seconds=30)
    assert (run.stdout, run.stderr, run.returncode) == ("6\n", "", 0)
