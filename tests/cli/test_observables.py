"""Are stored observables read where they fit, named where they do not, and never a reason to stop?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import pytest
from program import done, kvreplay

H2O = ["-p", "h2o,snapkv:window=4", "-b", "0.1", "--threads", "1"]
READ = "kvreplay: stored observables read from long.obs.h5: " + ", ".join(
    f"{name} of 12 layers" for name in ("cumulative_attention", "key_similarity", "value_similarity")
)
NOT_USED = "(stored observables are not used)"


@pytest.fixture
def folder(traces: Path, tmp_path: Path) -> Path:
    """A folder with long.h5, the observables that a first run kept, and that run's results."""
    shutil.copy(traces / "long.h5", tmp_path)
    done("replay", "long.h5", *H2O, "--observables", "keep", "-o", "first", folder=tmp_path)
    return tmp_path


def replay(folder: Path, *more: str) -> str:
    """Stderr of a run into a new folder, whose results must be those of the first run."""
    shutil.rmtree(folder / "again", ignore_errors=True)
    answer = kvreplay("replay", "long.h5", *H2O, *more, "-o", "again", folder=folder)
    assert answer.code == 0, answer
    assert (folder / "again/results.csv").read_bytes() == (folder / "first/results.csv").read_bytes()
    done("diff", "first", "again", folder=folder)
    return answer.err


def test_a_second_run_reads_says_so_and_has_the_same_bytes(folder: Path) -> None:
    assert replay(folder) == READ + "\n"
    run = json.loads((folder / "again/run.json").read_text())
    names = ["cumulative_attention", "key_similarity", "value_similarity"]
    assert run["inputs"][0]["read_observables"] == dict.fromkeys(names, 12)
    assert run["options"]["observables"] == "use"
    assert json.loads((folder / "first/run.json").read_text())["inputs"][0]["read_observables"] == {}
    assert replay(folder, "--observables", "ignore") == ""


def test_a_run_without_the_word_writes_nothing_beside_the_trace(traces: Path) -> None:
    assert not list(traces.glob("*.obs.h5*"))


def test_what_is_stored_is_not_of_another_boundary(folder: Path) -> None:
    words = ["replay", "long.h5", *H2O, "--boundary", "400"]
    done(*words, "-o", "b400", folder=folder)
    done(*words, "--observables", "keep", "-o", "c400", folder=folder)
    answer = kvreplay(*words, "-o", "d400", folder=folder)
    assert answer.err == READ + "\n"
    assert (folder / "d400/results.csv").read_bytes() == (folder / "b400/results.csv").read_bytes()
    assert replay(folder) == READ + "\n"


def test_info_and_plan_mention_it(folder: Path) -> None:
    stored = json.loads(done("info", "long.h5", "--json", folder=folder))[0]["stored_observables"]
    assert len(stored) == 1
    assert stored[0].startswith("long.obs.h5: cumulative_attention of 12 layers, key_similarity of 12 layers, ")
    assert " for boundary 512, computed by cpu " in stored[0]
    assert stored[0] in " ".join(done("info", "long.h5", "--no-estimate", folder=folder).split())
    (folder / "long.obs.h5").write_bytes(b"nothing")
    assert "long.obs.h5: signature: expected an HDF5 file" in done("info", "long.h5", "--no-estimate", folder=folder)


def test_all_traces_of_a_folder_can_be_named(folder: Path) -> None:
    names = sorted(path.name for path in folder.glob("*.h5"))
    assert names == ["long.h5", "long.obs.h5"]
    answer = kvreplay("replay", *names, *H2O, "-o", "all", folder=folder)
    assert (answer.code, answer.err) == (0, READ + "\n")
    assert kvreplay("replay", "./long.h5", "long.obs.h5", *H2O, "-o", "all", "--dry-run", folder=folder).code == 0
    assert done("validate", *names, folder=folder) == "long.h5: valid\n"
    assert [entry["path"] for entry in json.loads(done("validate", *names, "--json", folder=folder))] == ["long.h5"]
    assert "stored observables of a trace" not in done("info", *names, "--no-estimate", folder=folder)
    assert done("info", "long.obs.h5", folder=folder) == "long.obs.h5: stored observables of a trace\n"
    documents = json.loads(done("info", "long.obs.h5", "--json", folder=folder))
    assert documents == [{"path": "long.obs.h5", "kind": "stored observables"}]
    assert kvreplay("validate", "long.obs.h5", folder=folder).code == 1


def test_a_trace_is_not_left_out_for_its_name(folder: Path) -> None:
    (folder / "long.obs.h5").unlink()
    done("synth", "fixture", "-o", "long.obs.h5", folder=folder)
    words = ["replay", "long.h5", "long.obs.h5", *H2O, "--observables", "ignore", "--dry-run", "--json"]
    plan = json.loads(done(*words, "-o", "both", folder=folder))
    assert [trace["name"] for trace in plan["traces"]] == ["long", "long.obs"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def of_another_version(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 2


def with_nan(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["000/003/cumulative_attention"][1, 2] = float("nan")


def with_another_number(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["000/003/cumulative_attention"][1, 2] *= 2


def with_layers_exchanged(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file.move("000/003", "000/x")
        file.move("000/004", "000/003")
        file.move("000/x", "000/004")


def linked_elsewhere(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["000/003"]
        file["000/003"] = h5py.ExternalLink("first/cells/long.h5", "/")


def not_a_file(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "long.obs.h5: length: expected "),
        (of_another_version, "long.obs.h5: version: expected 1, found 2"),
        (with_nan, "/000/003/cumulative_attention: xxh3: expected "),
        (with_another_number, "/000/003/cumulative_attention: xxh3: expected "),
        (with_layers_exchanged, "/000/003/key_similarity: xxh3: expected "),
        (linked_elsewhere, "/000/003: link: expected "),
        (not_a_file, "long.obs.h5: kind: expected a file, found a directory"),
    ],
)
def test_what_is_damaged_is_one_warning_and_never_used(folder: Path, damage, named: str) -> None:
    damage(folder / "long.obs.h5")
    warnings = [
        line for line in replay(folder).splitlines() if not line.startswith("kvreplay: stored observables read from ")
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith("kvreplay: warning: ")
    assert named in warnings[0]
    assert warnings[0].endswith(NOT_USED)


def a_trace(path: Path) -> None:
    shutil.copy(path.with_name("long.h5"), path)


def notes(path: Path) -> None:
    path.write_text("notes")


@pytest.mark.parametrize("damage", [truncate, a_trace, notes, not_a_file])
def test_keep_leaves_another_file_alone(folder: Path, damage) -> None:
    beside = folder / "long.obs.h5"
    damage(beside)
    before = beside.read_bytes() if beside.is_file() else None
    assert replay(folder, "--observables", "keep") == (
        "kvreplay: warning: long.obs.h5: not a file of stored observables, or damaged; remove it first "
        "(observables are not kept)\n"
    )
    assert (beside.read_bytes() if beside.is_file() else None) == before


@pytest.mark.parametrize("damage", [of_another_version, with_nan])
def test_keep_replaces_what_is_damaged(folder: Path, damage) -> None:
    damage(folder / "long.obs.h5")
    assert NOT_USED in replay(folder, "--observables", "keep")
    assert replay(folder) == READ + "\n"


def test_observables_of_another_trace_are_passed_over(folder: Path) -> None:
    shape = ["--layers", "12", "--prompt", "512", "--continuation", "64", "--head-dim", "32", "--seed", "1"]
    done("synth", "sinks", "-o", "other.h5", *shape, folder=folder)
    (folder / "long.obs.h5").rename(folder / "other.obs.h5")
    assert done("replay", "other.h5", *H2O, "-o", "other", folder=folder)
    assert "other.obs.h5: belongs to another trace" in done("info", "other.h5", "--no-estimate", folder=folder)


def test_a_name_that_cannot_be_written_is_one_warning(folder: Path) -> None:
    (folder / "long.obs.h5").unlink()
    (folder / "long.obs.h5.partial").mkdir()
    assert replay(folder, "--observables", "keep") == (
        "kvreplay: warning: long.obs.h5.partial: cannot be made: Is a directory (observables are not kept)\n"
    )


def test_what_a_killed_run_left_is_not_read(folder: Path) -> None:
    (folder / "long.obs.h5").rename(folder / "long.obs.h5.partial")
    assert replay(folder) == ""
    assert replay(folder, "--observables", "keep") == ""
    assert not (folder / "long.obs.h5.partial").exists()
    assert replay(folder) == READ + "\n"
