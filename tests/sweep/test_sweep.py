"""Is a sweep complete and equal to one replay, whatever is killed on the way?"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from program import done
from trial_sweeps import CELLS, NAMES, Cluster, Sweeps, assert_equal, table, wait_for

from kvreplay.sweep import tables
from kvreplay.sweep.tables import parts


def assert_whole(sweeps: Sweeps, single: Path) -> None:
    rows = table(sweeps.output)
    assert [name for name in rows if "/" not in name] == NAMES and {row["state"] for row in rows.values()} == {"done"}
    assert_equal(sweeps.output, single)
    assert not (sweeps.output / "shards").exists()


def test_processes_of_this_machine(sweeps: Sweeps, single: Path) -> None:
    """A local cluster, of which a worker is killed in the middle of a task."""
    sweeps.fault_once("t1", "kill -9 $PPID")
    answer = sweeps.run_apart("--workers", 2)
    assert answer.code == 0, answer
    assert answer.out.startswith(f"sweep    4 of 4 tasks done   {4 * CELLS} cells in ")
    assert answer.err.startswith("kvreplay: sweep: dashboard http://127.0.0.1:") and answer.err.count("\n") == 1
    assert_whole(sweeps, single)
    rows = table(sweeps.output)
    assert {name: row["attempts"] for name, row in rows.items()} == {"t0": "1", "t1": "2", "t2": "1", "t3": "1"}
    assert all(row["cells"] == str(CELLS) and float(row["seconds"]) > 0 and row["worker"] for row in rows.values())
    # What is done is done: the same again calls no task.
    sweeps.fault("exit 1")
    assert sweeps.run("--workers", 2).out.startswith("sweep    every task is done, by earlier calls: 4 ")
    assert len(sweeps.calls()) == 5


def test_a_running_cluster(sweeps: Sweeps, single: Path, cluster: Cluster) -> None:
    """By its address: a program killed as the system does when memory is out, another one refused its memory."""
    sweeps.fault(f"""case $name in
      t0) mkdir {sweeps.folder}/killed 2>/dev/null && kill -9 $$;;
      t2) mkdir {sweeps.folder}/refused 2>/dev/null && set -- "$@" --memory 1k;;
    esac""")
    answer = sweeps.run("--executor", f"dask:{cluster.address}")
    assert answer.code == 0, answer
    assert_whole(sweeps, single)
    assert {name: row["attempts"] for name, row in table(sweeps.output).items()} == {
        "t0": "2", "t1": "1", "t2": "2", "t3": "1"}  # fmt: skip


@pytest.mark.parametrize("from_file", [False, True])
def test_protected_tokens_and_controls_reach_the_tasks(
    sweeps: Sweeps, cluster: Cluster, operands: list[str], from_file: bool
) -> None:
    options = {"protect": "sinks=4,recent=10%", "controls": "twins"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    done("replay", *operands, *words, "-o", "single", folder=sweeps.folder)
    if from_file:
        asked = {"traces": operands[: len(NAMES)], "policies": ["snapkv", "h2o"], "budgets": [0.1, 0.2]}
        (sweeps.folder / "sweep.yaml").write_text(json.dumps(asked | options))
        sweeps.operands, words = ["@sweep.yaml"], []
    answer = sweeps.run("--executor", f"dask:{cluster.address}", *words)
    assert answer.code == 0, answer
    assert_equal(sweeps.output, sweeps.folder / "single")
    policies = json.loads((sweeps.output / "run.json").read_text())["policies"]
    assert {policy["parameters"].get("protect") for policy in policies if policy["name"] in ("snapkv", "h2o")} == {
        "(sinks=4,recent=0.1)"
    }
    assert ",control,random-twin," in (sweeps.output / "results.csv").read_text()


@pytest.mark.parametrize("part, count", [(tables.PART, 1), (4096, 2)])
def test_tables_are_copied(
    sweeps: Sweeps, single: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, part: int, count: int
) -> None:
    """By the client, or in parts by workers: byte for byte those that a merge writes."""
    monkeypatch.setattr(tables, "PART", part)
    monkeypatch.setattr(tables, "BLOCK", 512)
    written: list[int] = []
    monkeypatch.setattr(tables, "parts", lambda *asked: written.append(len(found := parts(*asked))) or found)
    assert sweeps.run("--executor", f"dask:{cluster.address}").code == 0
    assert written == [count, count]
    done("merge", "merged", sweeps.output, folder=sweeps.folder)
    for name in tables.TABLES:
        assert (sweeps.output / name).read_bytes() == (sweeps.folder / "merged" / name).read_bytes()
    assert_whole(sweeps, single)


def one_trace(sweeps: Sweeps) -> list[str]:
    """Fewer traces than workers; the names of what is computed."""
    sweeps.operands = [sweeps.operands[0], *sweeps.operands[len(NAMES) :]]
    return ["t0 1of2", "t0 2of2"]


def test_a_trace_is_divided_among_workers(sweeps: Sweeps, cluster: Cluster) -> None:
    groups = one_trace(sweeps)
    done("replay", *sweeps.operands, "-o", "single", folder=sweeps.folder)
    sweeps.fault_once(groups[1], "kill -9 $$")
    answer = sweeps.run("--executor", f"dask:{cluster.address}")
    assert answer.code == 0 and answer.out.startswith(f"sweep    3 of 3 tasks done   {CELLS} cells in "), answer
    assert_equal(sweeps.output, sweeps.folder / "single")
    rows = {name: (row["state"], row["attempts"]) for name, row in table(sweeps.output).items()}
    assert rows == {"t0": ("done", "1"), "t0 1/2": ("done", "1"), "t0 2/2": ("done", "2")}
    assert sorted(sweeps.calls()) == [groups[0], groups[1], groups[1]]


def test_finished_groups_are_not_computed_again(sweeps: Sweeps, cluster: Cluster) -> None:
    groups = one_trace(sweeps)
    done("replay", *sweeps.operands, "-o", "single", folder=sweeps.folder)
    sweeps.fault(f'[ "$name" = "{groups[0]}" ] || exec sleep 120')
    words = ["--executor", f"dask:{cluster.address}"]
    client = sweeps.start(*words)
    wait_for(lambda: list(sweeps.output.glob("shards/*/run.json")) and groups[1] in sweeps.calls())
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    sweeps.fault("")
    cells = CELLS - CELLS // 2 - 3  # without those of one policy and the controls
    answer = sweeps.run(*words)
    assert answer.code == 0 and f" {cells} cells in " in answer.out, answer
    assert_equal(sweeps.output, sweeps.folder / "single")


def test_a_worker_of_it_is_killed(sweeps: Sweeps, single: Path, cluster: Cluster) -> None:
    sweeps.fault_once("t2", "kill -9 $PPID; sleep 60")
    answer = sweeps.run("--executor", f"dask:{cluster.address}", "--retries", 1)
    assert answer.code == 0, answer
    assert_whole(sweeps, single)
    assert sorted(sweeps.calls()) == ["t0", "t1", "t2", "t2", "t3"]


def test_what_fails_every_time_is_marked(sweeps: Sweeps, single: Path, cluster: Cluster) -> None:
    sweeps.fault('[ "$name" = t1 ] && { echo "kvreplay: t1.h5: on no disk" >&2; exit 3; }')
    words = ["--executor", f"dask:{cluster.address}", "--retries", 1]
    answer = sweeps.run(*words)
    assert answer.code == 6, answer
    assert answer.err.endswith("kvreplay: failed: t1: t1.h5: on no disk (2 attempts)\n"), answer
    row = table(sweeps.output)["t1"]
    assert (row["state"], row["attempts"], row["reason"]) == ("failed", "2", "t1.h5: on no disk")
    assert sorted(sweeps.calls()) == ["t0", "t1", "t1", "t2", "t3"]
    assert (sweeps.output / "results.csv").exists()  # of the others
    sweeps.fault("")
    assert sweeps.run(*words).code == 0
    assert sorted(sweeps.calls()[5:]) == ["t1 1of2", "t1 2of2"]  # by both workers, and nothing else is done again
    assert_whole(sweeps, single)


def interrupted(sweeps: Sweeps, how: signal.Signals, *words: object):
    """Stopped when two tasks are done and the others hang."""
    sweeps.fault(f"[ $(wc -l <{sweeps.folder}/calls) -le 2 ] || exec sleep 120")
    client = sweeps.start(*words)
    wait_for(lambda: len(list(sweeps.output.glob("shards/*/run.json"))) == 2 and len(sweeps.calls()) > 2)
    (os.killpg if how == signal.SIGINT else os.kill)(client.pid, how)  # Ctrl-C is for all that a terminal started
    _, said = client.communicate(timeout=60)
    sleeping = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"sleep\x00120" in read(path)]
    merging = f"merge\0{sweeps.output}\0".encode()
    merges = [path for path in Path("/proc").glob("[0-9]*/cmdline") if merging in read(path)]
    wait_for(lambda: not any(path.exists() for path in [*sleeping, *merges]))  # programs die with their sweep
    return client.returncode, said


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def goes_on(sweeps: Sweeps, single: Path, *words: object) -> None:
    sweeps.fault("")
    finished, before = sweeps.calls()[:2], len(sweeps.calls())
    answer = sweeps.run(*words)
    assert answer.code == 0, answer
    assert sorted(sweeps.calls()[before:]) == sorted(set(NAMES) - set(finished))  # what was finished stays
    assert_whole(sweeps, single)


def test_the_client_is_killed_and_comes_back(sweeps: Sweeps, single: Path, cluster: Cluster) -> None:
    """Its own cluster dies with it; another one may go on."""
    code, _ = interrupted(sweeps, signal.SIGKILL, "--workers", 1)
    assert code == -signal.SIGKILL
    words = ["--executor", f"dask:{cluster.address}"]
    goes_on(sweeps, single, *words)


def test_the_client_of_a_running_cluster_is_killed(sweeps: Sweeps, single: Path, cluster: Cluster) -> None:
    """Its tasks are taken back from workers that stay."""
    code, _ = interrupted(sweeps, signal.SIGKILL, "--executor", f"dask:{cluster.address}")
    assert code == -signal.SIGKILL
    goes_on(sweeps, single, "--executor", f"dask:{cluster.address}")


def test_interrupted(sweeps: Sweeps, single: Path, cluster: Cluster) -> None:
    code, said = interrupted(sweeps, signal.SIGINT, "--workers", 1)
    assert code == 130
    assert said.split("\n")[1:] == [
        "kvreplay: sweep: interrupted; finished tasks are kept; run the same command to continue",
        "",
    ]
    assert not list(sweeps.output.glob("cells*"))  # of finished tasks either
    goes_on(sweeps, single, "--executor", f"dask:{cluster.address}")


def test_results_are_merged_while_other_tasks_run(sweeps: Sweeps, single: Path, cluster: Cluster) -> None:
    """The file of a finished task is staged, that of a killed attempt is not."""
    sweeps.fault(f"""case $name in
      t1) mkdir {sweeps.folder}/met 2>/dev/null && kill -9 $$;;&
      t1) until [ -e {sweeps.folder}/go ]; do sleep 0.1; done;;
    esac""")
    client = sweeps.start("--executor", f"dask:{cluster.address}")
    staged = sweeps.output / "cells.partial"
    wait_for(lambda: staged.is_dir() and {path.stem for path in staged.iterdir()} >= {"t0", "t2", "t3"})
    assert not (staged / "t1.h5").exists() and not list((sweeps.output / "cells").iterdir())
    (sweeps.folder / "go").touch()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 0, err
    assert_whole(sweeps, single)


def test_the_error_of_the_merge_is_reported(sweeps: Sweeps, cluster: Cluster) -> None:
    """The merge may end while tasks run. Finished tasks are kept."""
    program = sweeps.folder / "bin" / "kvreplay"
    program.write_text(
        program.read_text().replace("exec ", '[ "$1" = merge ] && { echo "kvreplay: no disk" >&2; exit 5; }\nexec ')
    )
    answer = sweeps.run("--executor", f"dask:{cluster.address}")
    assert (answer.code, answer.err.split("\n")[1:]) == (5, ["kvreplay: no disk", ""]), answer
    assert len(list(sweeps.output.glob("shards/*/run.json"))) == len(NAMES)


def test_two_sweeps_in_one_folder(sweeps: Sweeps, cluster: Cluster) -> None:
    sweeps.fault("exec sleep 120")
    words = ["--executor", f"dask:{cluster.address}"]
    first = sweeps.start(*words)
    wait_for(sweeps.calls)
    second = sweeps.run(*words)
    assert (
        second.code == 2 and "another sweep is writing to this folder; wait for it, or use another folder" in second.err
    )
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
