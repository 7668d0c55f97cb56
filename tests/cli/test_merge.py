"""Do the results of several machines become those of one?"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from program import Answer, done, kvreplay, start

BUDGETS = ["-b", "0.25,8"]
POLICIES = ["h2o", "knorm", "snapkv"]  # in the order of their folders


def replay(folder: Path, output: str, traces: str, policies: str, *more: str) -> None:
    answer = kvreplay("replay", *traces.split(), "-p", policies, *BUDGETS, *more, "-o", output, folder=folder)
    assert answer.code == 0, answer


def refused(answer: Answer, code: int, *words: str) -> bool:
    return answer.code == code and answer.err.count("\n") == 1 and all(word in answer.err for word in words)


def same(one: Path, other: Path) -> bool:
    tables = [(run / "results.csv").read_bytes() for run in (one, other)]
    return tables[0] == tables[1] and kvreplay("diff", one, other, folder=one).out == "equal\n"


def about(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two traces in one run, `whole`; in `by-trace` a shard each, in `by-policy` a shard for each policy."""
    folder = tmp_path_factory.mktemp("runs")
    shape = ["--layers", "2", "--prompt", "40", "--continuation", "4", "--head-dim", "8"]
    for seed, name in enumerate("ab"):
        done("synth", "sinks", "-o", f"{name}.h5", "--seed", str(seed), *shape, folder=folder)
        replay(folder, f"by-trace/{name}", f"{name}.h5", ",".join(POLICIES))
    replay(folder, "whole", "a.h5 b.h5", ",".join(POLICIES))
    for policy in POLICIES:
        replay(folder, f"by-policy/{policy}", "a.h5 b.h5", policy)
    return folder


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return shutil.copytree(runs, tmp_path / "runs")


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def merged(folder: Path, *words: str) -> Answer:
    return kvreplay("merge", "out", *words, folder=folder)


def test_shards_with_different_controls_are_merged_with_a_warning(folder: Path) -> None:
    replay(folder, "twins/a", "a.h5", "h2o", "--controls", "twins")
    replay(folder, "twins/b", "b.h5", "h2o", "--controls", "none")
    for order in ("twins/a twins/b", "twins/b twins/a"):
        answer = kvreplay("merge", f"of-{order[-1]}", *order.split(), folder=folder)
        assert answer.code == 0 and "options controls: " in answer.err, answer
        run = about(folder / f"of-{order[-1]}")
        assert "controls" not in run["options"] and run["options"]["eval"] == "continuation"
        assert sorted(shard["options"]["controls"] for shard in run["shards"]) == ["none", "twins"]
        assert run["self_check"]["result"][0] == "full error 0", "where it was replayed"
    replay(folder, "twins/c", "b.h5", "h2o", "--controls", "twins")
    assert kvreplay("merge", "agreed", "twins/a", "twins/c", folder=folder).err == ""


@pytest.mark.parametrize("shards", ["by-trace", "by-policy"])
def test_shards_become_the_run_of_one_machine(folder: Path, shards: str) -> None:
    answer = merged(folder, shards)
    cells = len(about(folder / "whole")["cells"])
    assert (answer.code, answer.err) == (0, "") and f"2 traces, {cells} cells" in answer.out
    assert same(folder / "out", folder / "whole")
    assert done("diff", "whole", "out", folder=folder) == "equal\n"
    told, whole = about(folder / "out"), about(folder / "whole")
    for entry in ("schema", "host", "build", "backend", "inputs", "policies", "metrics", "options", "numerics", "seed",
                  "self_check", "cells"):  # fmt: skip
        assert told[entry] == whole[entry], entry
    shown = [shard["path"] for shard in told["shards"]]
    assert shown == sorted(str(path) for path in (folder / shards).iterdir())
    assert all("replay" in shard["argv"] for shard in told["shards"])
    assert {shard["backend"]["description"] for shard in told["shards"]} == {whole["backend"]["description"]}
    assert not list((folder / "out").rglob("*.partial"))


def test_files_may_be_symbolic_links(folder: Path) -> None:
    for path in folder.glob("by-trace/*/cells/*.h5"):
        path.rename(folder / f"kept-{path.name}")
        path.symlink_to(f"../../../kept-{path.name}")
    assert merged(folder, "by-trace").code == 0
    shutil.rmtree(folder / "by-trace")
    assert same(folder / "out", folder / "whole")
    assert not any(path.is_symlink() for path in (folder / "out/cells").iterdir())
    assert done("diff", "whole", "out", folder=folder) == "equal\n"


def test_tables_are_written_anew_from_cells_alone(folder: Path) -> None:
    for path in (folder / "whole").glob("*.csv"):
        path.write_text("lost")
    assert done("merge", "whole", folder=folder) == "0 folders: 2 traces, 24 cells     whole\n"
    assert done("merge", "once", "whole", folder=folder).startswith("1 folder: 2 traces, 24 cells ")
    assert merged(folder, "by-trace").code == 0 and same(folder / "out", folder / "whole")


def test_tables_may_be_left_as_they_are(folder: Path) -> None:
    """As a sweep wants it, whose workers write them."""
    assert merged(folder, "by-trace", "--no-tables").code == 0
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["cells", "run.json"]
    told = about(folder / "out")
    assert merged(folder).code == 0 and same(folder / "out", folder / "whole")
    for entry in ("inputs", "policies", "options", "self_check", "cells"):
        assert about(folder / "out")[entry] == told[entry] == about(folder / "whole")[entry], entry


def test_tables_of_a_folder_do_not_become_outdated(folder: Path) -> None:
    assert merged(folder, "by-trace/a").code == 0
    answer = merged(folder, "by-trace/b", "--no-tables")
    assert refused(answer, 2, "--no-tables", "the existing results.csv would not contain the merged cells")
    assert merged(folder, "by-trace/b").code == 0 and same(folder / "out", folder / "whole")


def test_cells_that_run_json_does_not_list_are_merged_without_tables(folder: Path) -> None:
    """A later call into a folder lists its own cells alone; an interrupted one has no list."""
    replay(folder, "by-trace/a", "a.h5", "tova")
    (folder / "by-trace/b/run.json").unlink()
    assert merged(folder, "by-trace", "--no-tables").code == 0
    told = {(cell["trace"], cell["policy"]) for cell in about(folder / "out")["cells"]}
    assert {("a", "tova"), ("a", "h2o"), ("b", "h2o")} <= told
    listed = len(about(folder / "out")["cells"])
    assert merged(folder).code == 0 and len(about(folder / "out")["cells"]) == listed


def test_versions_of_a_policy_are_not_mixed_without_tables(folder: Path) -> None:
    for trace in "ab":
        path = folder / f"by-trace/{trace}/run.json"
        told = about(path.parent)
        for cell in told["cells"]:
            if cell["policy"] == "h2o":
                cell["source"] = trace
        path.write_text(json.dumps(told))
    answer = merged(folder, "by-trace", "--no-tables")
    assert refused(answer, 2, "by-trace/b/cells/b.h5", "h2o comes from another version of its file than in by-trace/a")


def test_a_failed_cell_stays_failed_in_its_own_folder(folder: Path) -> None:
    told = about(folder / "whole")
    told["cells"][0] |= {"state": "failed", "error": "no luck"}
    (folder / "whole/run.json").write_text(json.dumps(told))
    assert kvreplay("merge", "whole", folder=folder).code == 6
    assert about(folder / "whole")["cells"][0]["state"] == "failed"


def test_what_a_run_says_of_itself_is_renewed(folder: Path) -> None:
    path = folder / "by-trace/b/run.json"
    later = path.read_text()
    path.unlink()
    assert merged(folder, "by-trace").code == 0
    assert about(folder / "out")["shards"][1].keys() == {"path"}
    path.write_text(later.replace("budget ok", "budget VIOLATED in 1 cells"))
    assert merged(folder, "by-trace").code == 0
    run = about(folder / "out")
    assert run["shards"][1]["options"] == json.loads(later)["options"]
    assert run["self_check"]["result"][1] == "budget VIOLATED in 1 cells"


def test_what_is_merged_is_replayed_no_more(folder: Path) -> None:
    assert merged(folder, "by-policy").code == 0
    plan = json.loads(done("replay", "a.h5", "b.h5", "-p", ",".join(POLICIES), *BUDGETS, "-o", "out", "--dry-run",
                           "--json", folder=folder))  # fmt: skip
    assert all(not trace["cells"] and trace["skipped"] for trace in plan["traces"])


def test_a_merge_goes_on(folder: Path) -> None:
    assert merged(folder, "by-policy/h2o", "by-trace/b").code == 0
    assert not same(folder / "out", folder / "whole")
    assert merged(folder, "by-policy/snapkv").code == 0
    (folder / "list").write_text("by-policy/knorm\n\nby-policy\n")
    assert merged(folder, "@list").code == 0
    assert same(folder / "out", folder / "whole")
    assert len(about(folder / "out")["shards"]) == 4
    shutil.rmtree(folder / "by-policy")
    shutil.rmtree(folder / "by-trace")
    assert done("diff", "whole", "out", folder=folder) == "equal\n"


def test_finished_traces_of_an_interrupted_run_are_taken(folder: Path) -> None:
    for name in ("run.json", "results.csv"):
        (folder / "by-trace/b" / name).unlink()
    answer = merged(folder, "by-trace")
    assert answer.code == 0 and "by-trace/b: interrupted run" in answer.err and answer.err.count("\n") == 1
    assert same(folder / "out", folder / "whole")
    told, whole = about(folder / "out"), about(folder / "whole")
    assert told["cells"] == whole["cells"]
    assert {one["trace"]: "path" in one for one in told["inputs"]} == {"a": True, "b": False}


def test_cells_that_failed_stay_failed_until_they_are_there(folder: Path) -> None:
    path = folder / "by-trace/b/run.json"
    told = json.loads(path.read_text())
    lost = told["cells"][0] | {"state": "failed", "error": "no luck", "cell": "0" * 16}
    path.write_text(json.dumps(told | {"cells": [*told["cells"], lost, told["cells"][1] | {"state": "failed"}]}))
    answer = merged(folder, "by-trace")
    assert answer.code == 6 and answer.err == "kvreplay: failed: b, h2o at budget 0.25: no luck\n"
    assert sum(cell["state"] == "failed" for cell in about(folder / "out")["cells"]) == 1


def test_a_trace_that_could_not_be_opened_is_whole_once_another_folder_has_it(folder: Path) -> None:
    whole = (folder / "b.h5").read_bytes()
    (folder / "b.h5").write_bytes(whole[: len(whole) // 2])
    options = ["-p", ",".join(POLICIES), *BUDGETS, "-o", "first"]
    assert kvreplay("replay", "a.h5", "b.h5", *options, folder=folder).code == 6
    (folder / "b.h5").write_bytes(whole)
    answer = merged(folder, "first", "by-policy/h2o")
    asked = 2 * len(BUDGETS[1].split(","))  # knorm and snapkv
    assert answer.code == 6 and answer.err.count("failed: b, ") == asked and "h2o" not in answer.err
    answer = merged(folder, "by-trace/b")
    assert (answer.code, answer.err) == (0, "")
    assert about(folder / "out")["cells"] == about(folder / "whole")["cells"]


def test_other_numbers_of_one_cell_are_refused(folder: Path) -> None:
    with h5py.File(folder / "by-policy/snapkv/cells/b.h5", "r+") as file:
        cell = next(name for name, cell in file["cells"].items() if cell.attrs.get("policy") == b"random")
        file[f"values/{cell}/numbers"][-1] += 1
    assert refused(merged(folder, "by-policy"), 3, "by-policy/snapkv/cells/b.h5", "by-policy/h2o/cells/b.h5", "random")
    assert not (folder / "out/run.json").exists()


def test_of_what_is_refused_nothing_is_taken(folder: Path) -> None:
    with h5py.File(folder / "by-policy/snapkv/cells/b.h5", "r+") as file:
        cell = next(name for name, cell in file["cells"].items() if cell.attrs.get("policy") == b"random")
        file[f"values/{cell}/numbers"][-1] += 1
    assert merged(folder, "by-trace/a").code == 0
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    assert merged(folder, "by-policy").code == 3
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()} == before
    (folder / "out/cells.partial").mkdir()  # of a merge that was killed
    (folder / "out/cells.partial/c.h5").write_text("no HDF5")
    assert merged(folder, "by-trace/b").code == 0
    assert same(folder / "out", folder / "whole") and not list((folder / "out").rglob("*.partial"))


@pytest.mark.parametrize(("instead", "found"), [(os.mkfifo, "a device or pipe"), (os.mkdir, "a directory")])
def test_what_is_no_file_is_refused(instead: Callable[[Path], None], found: str, folder: Path) -> None:
    path = folder / "by-trace/a/cells/a.h5"
    path.unlink()
    instead(path)
    assert refused(merged(folder, "by-trace"), 3, f"by-trace/a/cells/a.h5: kind: expected a file, found {found}")


def test_other_sets_of_one_cell_are_refused(folder: Path) -> None:
    with h5py.File(folder / "by-policy/snapkv/cells/b.h5", "r+") as file:
        cell = next(name for name, cell in file["cells"].items() if cell.attrs.get("policy") == b"random")
        kept = file[f"cells/{cell}/positions"]
        kept[0] = min(set(range(40)) - set(kept[: file[f"cells/{cell}/offsets"][1]]))
    assert refused(merged(folder, "by-policy"), 3, "snapkv/cells/b.h5:/cells/", "h2o/cells/b.h5")


@pytest.mark.parametrize("conditions", [["--boundary", "30"], ["--eval", "last:2"]])
def test_other_conditions_of_one_trace_are_refused(folder: Path, conditions: list[str]) -> None:
    replay(folder, "other", "a.h5", "h2o", *conditions)
    answer = merged(folder, "by-trace", "other")
    assert refused(answer, 2, "other/cells/a.h5", "by-trace/a/cells/a.h5", conditions[0].strip("-"))


def test_another_version_of_a_policy_is_refused_with_both_files(folder: Path) -> None:
    replay(folder, "other", "a.h5", "h2o", "-b", "16")
    with h5py.File(folder / "other/cells/a.h5", "r+") as file:
        for cell in file["values"].values():
            if cell.attrs.get("policy") == b"h2o":
                cell.attrs["source"] = np.bytes_("edited")
    answer = merged(folder, "by-policy", "other")
    assert refused(answer, 2, "other/cells/a.h5: h2o comes from another version", "than in by-policy/h2o/cells/a.h5")


def test_another_trace_of_the_same_name_is_refused(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    shutil.copy(folder / "b.h5", folder / "elsewhere/a.h5")
    replay(folder, "other", "elsewhere/a.h5", "h2o")
    assert refused(merged(folder, "by-trace", "other"), 2, "trace hash", "other/cells/a.h5")


def test_other_seeds_and_options_are_named(folder: Path) -> None:
    replay(folder, "other", "b.h5", "h2o", "--eval", "last:2", "--seed", "3")
    answer = merged(folder, "by-trace/a", "other")
    assert answer.code == 0 and "options eval: continuation (by-trace/a), last:2 (other)" in answer.err
    assert "seed: 0 (by-trace/a), 3 (other)" in answer.err
    run = about(folder / "out")
    assert "eval" not in run["options"] and run["options"]["sliding"] == "skip" and "seed" not in run
    told = [(shard["options"]["eval"], shard["seed"]) for shard in run["shards"]]
    assert told == [("continuation", 0), ("last:2", 3)]


def test_the_coarsest_detail_is_shown(folder: Path) -> None:
    replay(folder, "by-trace/b", "b.h5", ",".join(POLICIES), "--detail", "summary")
    assert merged(folder, "by-trace").code == 0
    replay(folder, "whole", "a.h5 b.h5", ",".join(POLICIES), "--detail", "summary")
    assert same(folder / "out", folder / "whole")


def test_folders_that_a_run_writes_into_are_refused(folder: Path) -> None:
    for busy, operation, code in (("b", fcntl.LOCK_EX, 2), ("b", fcntl.LOCK_SH, 0), ("all", fcntl.LOCK_SH, 2)):
        (folder / "by-trace" / busy).mkdir(exist_ok=True)
        with open_folder(folder / "by-trace" / busy) as descriptor:
            fcntl.flock(descriptor, operation)
            answer = kvreplay("merge", "by-trace/all", "by-trace", folder=folder)
        assert answer.code == code, answer
        assert code == 0 or refused(answer, 2, f"by-trace/{busy}: another run is writing to this folder")
    done("merge", "by-trace/all", "by-trace", folder=folder)


def test_damaged_files_are_refused(folder: Path) -> None:
    path = folder / "by-trace/b/cells/b.h5"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert refused(merged(folder, "by-trace"), 3, "by-trace/b/cells/b.h5")


def test_run_json_that_is_none_is_refused(folder: Path) -> None:
    path = folder / "by-trace/b/run.json"
    for text in ("{", "[]", '{"schema": 3}', '{"schema": "kvreplay-run/1", "cells": [7]}'):
        path.write_text(text)
        assert refused(merged(folder, "by-trace"), 3, "by-trace/b/run.json"), text
    path.write_text('{"schema": "kvreplay-run/1", "options": {"detail": "fine"}}')
    assert refused(merged(folder, "by-trace"), 3, "by-trace/b/run.json: unknown detail", "fine")
    for deep in ("[" * 200_000, "[" * 200_000 + "]" * 200_000, '{"schema": ' * 200_000):
        path.write_text(deep)
        assert refused(merged(folder, "by-trace"), 3, "by-trace/b/run.json", "too deeply nested"), deep[:20]


def test_folders_that_cannot_be_meant(folder: Path) -> None:
    assert merged(folder, "by-trace").code == 0
    assert refused(merged(folder, "by-policy", "out"), 2, "out", "is the output folder")
    assert refused(merged(folder, "nowhere"), 3, "nowhere")
    (folder / "empty").mkdir()
    assert refused(merged(folder, "empty"), 3, "empty", "no results")
    assert refused(kvreplay("merge", "list", "by-trace", folder=folder.parent), 3, "by-trace")
    assert refused(kvreplay("merge", ".", "by-trace", folder=folder), 2, "contains other files")
    assert refused(kvreplay("merge", "new", folder=folder), 3, "new", "no finished trace in any folder")


@contextlib.contextmanager
def waiting_merge(folder: Path, *names: str) -> Iterator[subprocess.Popen[str]]:
    """A merge that reads folders from standard input, which has `names` and is open."""
    process = start("merge", "out", "-", "--no-tables", folder=folder, stdin=subprocess.PIPE)
    try:
        process.stdin.write("".join(f"{name}\n" for name in names))
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(what: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("shards", ["by-trace", "by-policy"])
def test_folders_from_standard_input(folder: Path, shards: str) -> None:
    """They are read as they arrive, and published after the last. Two files of one trace are joined."""
    names = [f"{shards}/{path.name}" for path in sorted((folder / shards).iterdir())]
    assert kvreplay("merge", "at-once", *names, "--no-tables", folder=folder).code == 0
    with waiting_merge(folder, *names[:-1]) as process:
        wait_for((folder / "out/cells.partial/a.h5").exists)
        assert not (folder / "out/run.json").exists() and not list((folder / "out/cells").iterdir())
        out, err = process.communicate(names[-1])  # a last line without its end
        assert (process.returncode, err) == (0, "") and out.startswith(f"{len(names)} folders: 2 traces"), out
    told, expected = about(folder / "out"), about(folder / "at-once")
    assert told | {"argv": []} == expected | {"argv": []}
    assert merged(folder).code == 0 and same(folder / "out", folder / "whole")


def test_a_folder_that_is_named_twice_counts_once(folder: Path) -> None:
    names = ["by-trace/a", "by-trace/b", "by-trace/a", "by-trace", "./by-trace/b"]
    assert kvreplay("merge", "at-once", *names, folder=folder).out.startswith("2 folders: 2 traces")
    with waiting_merge(folder, *names) as process:
        assert process.communicate()[0].startswith("2 folders: 2 traces")


def test_standard_input_that_cannot_be_read_publishes_nothing(folder: Path) -> None:
    unreadable = os.open(folder, os.O_RDONLY)
    try:
        answer = kvreplay("merge", "out", "by-trace/a", "-", folder=folder, stdin=unreadable)
    finally:
        os.close(unreadable)
    assert refused(answer, 3, "standard input: cannot be read")
    assert not (folder / "out/run.json").exists()


def test_a_damaged_folder_from_standard_input_ends_the_merge(folder: Path) -> None:
    path = folder / "by-trace/b/cells/b.h5"
    path.write_bytes(path.read_bytes()[:1000])
    with waiting_merge(folder, "by-trace/a", "by-trace/b") as process:
        assert process.wait(60) == 3 and "by-trace/b/cells/b.h5" in process.stderr.read()
    assert not (folder / "out").exists()


def test_an_interruption_while_waiting_for_folders_changes_nothing(folder: Path) -> None:
    with waiting_merge(folder, "by-trace/a") as process:
        wait_for((folder / "out/cells.partial/a.h5").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130 and "interrupted; nothing was merged" in process.stderr.read()
    assert not (folder / "out").exists()


def test_folders_that_are_named_twice_count_once(folder: Path) -> None:
    (folder / "alias").symlink_to("by-trace")
    answer = merged(folder, "by-trace", "by-trace/a", "by-trace/../by-trace/b", "alias", "alias/a")
    assert (answer.code, answer.err) == (0, "") and answer.out.startswith("2 folders: 2 traces")


def test_thousands_of_folders_are_told_apart_at_once(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"from/{number}/cells").mkdir(parents=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert refused(kvreplay("merge", "out", "from", folder=tmp_path), 3, "no finished trace in any folder")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 5, "comparing them two by two takes 12 s"


def test_out_may_lie_beside_what_it_is_made_of(folder: Path) -> None:
    for _ in range(2):
        done("merge", "by-trace/all", "by-trace", folder=folder)
        assert same(folder / "by-trace/all", folder / "whole")
