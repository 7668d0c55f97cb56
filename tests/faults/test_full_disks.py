"""Is a full disk one clear line with exit code 5 wherever it shows, and does the work go on once there is room?"""

from __future__ import annotations

import errno
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest
from program import PROGRAM, Answer, done
from subjects import Capture, Merge, Replay, Subject

RESOURCES = 5
FULL = [errno.ENOSPC, errno.EDQUOT]
SUBJECTS = ["replay", "merge", "synth", "capture"]
RESULTS = ("results.csv", "seconds.csv", "run.json")


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.getfixturevalue(request.param)


def refused(answer: Answer) -> bool:
    return answer.code == RESOURCES and answer.err.startswith("kvreplay: ") and answer.err.count("\n") == 1


def is_whole(path: Path, whole: Path) -> None:
    """A file that has its name is all there."""
    if path.suffix == ".h5":
        with h5py.File(path, "r", locking=False) as file, h5py.File(whole, "r", locking=False) as expected:
            assert set(file) == set(expected)
    elif path.name != "run.json":  # dates differ
        assert path.name == "seconds.csv" or path.read_bytes() == whole.read_bytes()


def check_left(subject: Subject, where: Path) -> None:
    result = where / subject.result
    for path in [result] if result.is_file() else result.rglob("*.*"):
        if path.is_file() and path.suffix != ".partial":
            is_whole(path, subject.whole / path.relative_to(result) if result.is_dir() else subject.whole)


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_every_call_that_changes_something(subject: Subject, interposed: Path, some: int, tmp_path: Path) -> None:
    tried = refusals = 0
    for call in range(1, 10_000):
        stride = some * (3 if isinstance(subject, Capture) else 1)
        if call % stride != 1 % stride and call > 4:
            continue
        fault = {"FAULT_AT": str(call), "FAULT_ERROR": str(FULL[call % 2]), "LD_PRELOAD": str(interposed)}
        with subject.trial(tmp_path) as where:
            answer = subject.ended(where, {**fault, "FAULT_FOLDER": str(where / "out")})
            check_left(subject, where)
            assert answer.code == 0 or refused(answer), (call, answer)
        tried += 1
        if answer.code == 0:
            break
        refusals += 1
    assert refusals == tried - 1 > 5


def sizes(whole: Path) -> list[int]:
    files = [whole] if whole.is_file() else [path for path in whole.rglob("*") if path.is_file()]
    return sorted({path.stat().st_size for path in files})


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_limits_of_a_file_s_size(subject: Subject, some: int, tmp_path: Path) -> None:
    """Each file of the result lacks a byte, and half of itself; and next to nothing may be written."""
    limits = {limit for size in sizes(subject.whole) for limit in (size - 1, size // 2)} | {4096}
    for limit in sorted(limits)[:: 1 if some == 1 else 3]:
        with subject.trial(tmp_path) as where:
            answer = subject.ended(where, limits={resource.RLIMIT_FSIZE: limit})
            check_left(subject, where)
            assert refused(answer), (limit, answer)


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_not_even_a_word_may_be_written(subject: Subject, tmp_path: Path) -> None:
    """What goes wrong is said to a file, too."""
    with subject.trial(tmp_path) as where:
        answer = subject.ended(where, limits={resource.RLIMIT_FSIZE: 0})
        assert (answer.code, answer.err) == (RESOURCES, "")


def test_few_files_may_be_open(replay: Replay, tmp_path: Path) -> None:
    refusals = 0
    for files in range(4, 40):  # with less no library is loaded
        with replay.trial(tmp_path) as where:
            answer = replay.ended(where, limits={resource.RLIMIT_NOFILE: files})
            if answer.code == 0:
                break
            assert refused(answer) and "Too many open files" in answer.err, (files, answer)
            refusals += 1
    assert refusals > 2


def test_a_merge_that_finds_no_room_takes_nothing(merge: Merge, interposed: Path, some: int, tmp_path: Path) -> None:
    """One that is refused leaves what an earlier one has written, to the last byte. Renaming takes no room."""
    refusals = 0
    for call in range(1, 10_000, max(1, some // 4)):
        fault = {"FAULT_AT": str(call), "FAULT_ERROR": str(errno.ENOSPC), "FAULT_SPARES_RENAMES": "1"}
        with merge.trial(tmp_path) as where:
            done("merge", "out", "shard-h2o", folder=where)
            before = {path: path.read_bytes() for path in (where / "out").rglob("*") if path.is_file()}
            answer = merge.ended(where, {**fault, "LD_PRELOAD": str(interposed), "FAULT_FOLDER": str(where / "out")})
            if answer.code == 0:
                break
            assert refused(answer), (call, answer)
            left = {path: path.read_bytes() for path in (where / "out").rglob("*") if path.is_file()}
            assert left == before, (call, answer)
            refusals += 1
    assert refusals > 5


def test_results_are_assembled_later(replay: Replay, tmp_path: Path) -> None:
    """Every trace is there: each table that is assembled from them fails in its turn, and no cell is computed again."""
    for name in RESULTS:
        with replay.trial(tmp_path) as where:
            shutil.copytree(replay.whole, where / "out")
            before = {path: path.stat().st_mtime_ns for path in (where / "out/cells").iterdir()}
            for later in RESULTS[RESULTS.index(name) :]:
                (where / "out" / later).unlink()
            (where / "out" / f"{name}.partial").symlink_to("/dev/full")
            answer = replay.ended(where)
            assert answer.code != 0 and not (where / "out" / name).exists(), answer
            (where / "out" / f"{name}.partial").unlink(missing_ok=True)
            assert {path: path.stat().st_mtime_ns for path in before} == before


def test_observables_that_find_no_room_are_not_kept(trace: Path, interposed: Path, some: int, tmp_path: Path) -> None:
    """They only save time: the run says so, and goes on."""
    words = ["replay", "fixture.h5", "-p", "h2o", "-b", "6", "--threads", "1"]
    done(*words, "-o", "whole", folder=tmp_path)
    keep = Replay(tmp_path, (*words, "--observables", "keep", "-o", "out"), "out")
    warnings = 0
    for call in range(1, 1000, max(1, some // 2)):
        fault = {"FAULT_AT": str(call), "FAULT_ERROR": str(errno.ENOSPC), "LD_PRELOAD": str(interposed)}
        answer = keep.ended(tmp_path, {**fault, "FAULT_FOLDER": str(tmp_path / "fixture.obs")})
        assert answer.code == 0 and done("diff", "whole", "out", folder=tmp_path) == "equal\n"
        shutil.rmtree(tmp_path / "out")
        if not answer.err:
            break
        assert "disk full (observables are not kept)" in answer.err and answer.err.count("\n") == 1
        assert not list(tmp_path.glob("fixture.obs*"))
        warnings += 1
    assert warnings > 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of memory, to be grown by remount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def grow(disk: Path, kib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kib}k", disk], check=True)


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_a_disk_that_grows(subject: Subject, small_disk: Path, some: int) -> None:
    """The same folder, again and again, with a little more room each time."""
    where = subject.place(small_disk / "trial")
    refusals = 0
    room = 64
    while True:
        answer = subject.ended(where)
        if answer.code == 0:
            break
        check_left(subject, where)
        assert refused(answer), answer
        assert not (isinstance(subject, Merge) and (where / "out").exists())
        refusals += 1
        room += 16 if some == 1 else 256
        assert room < 65536
        grow(small_disk, room)
    assert refusals > 1
    grow(small_disk, 65536)
    subject.finished(where)


def test_nobody_to_tell() -> None:
    """Standard output is full, too."""
    for command in ([PROGRAM, "policies"], [PROGRAM, "replay", "--help"]):
        with open("/dev/full", "w") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert refused(Answer(ended.returncode, "", ended.stderr)), ended
