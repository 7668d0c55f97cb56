"""Is a folder that cannot take results refused in one clear line, whatever is wrong with it?"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import Answer, done, kvreplay, start
from subjects import Capture, Replay, Subject, Synth

USAGE, INPUT = 2, 3
SUBJECTS = ["replay", "synth", "capture"]


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    return request.getfixturevalue(request.param)


def check_refusal(answer: Answer, *codes: int) -> None:
    assert answer.code in codes, answer
    assert answer.err.startswith("kvreplay: ") and answer.err.count("\n") == 1, answer


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A file system of memory that is read-only, for root as well."""
    folder = tmp_path / "closed"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_a_read_only_folder(subject: Subject, closed: Path) -> None:
    where = subject.place(closed / "trial")
    log = where / "log"
    log.symlink_to(closed.parent / "log")
    subprocess.run(["mount", "-o", "remount,ro", closed], check=True)
    answer = subject.ended(where)
    check_refusal(answer, USAGE, INPUT)
    assert "Read-only file system" in answer.err
    subprocess.run(["mount", "-o", "remount,rw", closed], check=True)
    subject.finished(where)


def test_a_file_that_is_replaced_while_it_is_merged(trace: Path, interposed: Path, tmp_path: Path) -> None:
    """By a run of more cells: it was read before, and is linked after."""
    for output, policies in (("shard", "h2o"), ("later", "h2o,knorm")):
        done("replay", trace.name, "-p", policies, "-b", "6", "-o", output, folder=tmp_path)
    cells = f"cells/{trace.name}"
    shutil.copy(tmp_path / "later" / cells, tmp_path / "replacement.h5")
    fault = {
        "FAULT_REPLACED": str(tmp_path / "shard" / cells),
        "FAULT_REPLACEMENT": str(tmp_path / "replacement.h5"),
        "LD_PRELOAD": str(interposed),
    }
    answer = kvreplay("merge", "out", "shard", folder=tmp_path, env={**os.environ, **fault})
    check_refusal(answer, USAGE)
    assert f"shard/{cells}: replaced by another run during the merge" in answer.err and not (tmp_path / "out").exists()
    done("merge", "out", "shard", folder=tmp_path)
    assert done("diff", "out", "later", folder=tmp_path) == "equal\n"


@pytest.mark.parametrize("subject", SUBJECTS, indirect=True)
def test_calls_that_fail_for_another_reason(subject: Subject, interposed: Path, some: int, tmp_path: Path) -> None:
    """The first failure ends the run: traces that follow could not be kept either."""
    for call in range(2, 1000, 3 * some):
        fault = {"FAULT_AT": str(call), "FAULT_ERROR": str(errno.EIO), "LD_PRELOAD": str(interposed)}
        with subject.trial(tmp_path) as where:
            answer = subject.ended(where, {**fault, "FAULT_FOLDER": str(where / "out")})
            if answer.code == 0:
                break
            check_refusal(answer, USAGE, INPUT)
    assert call > 2


def test_a_folder_that_vanishes(replay: Replay, tmp_path: Path) -> None:
    """It is found out when the first trace is done, not after all of them."""
    for name in ("cells", ""):
        where = replay.place(tmp_path / f"vanishing{name}")
        begun = replay.begun(where)
        out = where / "out" / "cells"
        while not out.is_dir():
            assert begun.poll() is None
        shutil.rmtree(where / "out" / name, ignore_errors=True)
        answer = begun.ended()
        check_refusal(answer, INPUT)
        assert "No such file" in answer.err
        replay.finished(where)


def test_a_captured_trace_s_folder_vanishes(capture: Capture, tmp_path: Path) -> None:
    where = capture.place(tmp_path / "vanishing")
    (where / "deep").mkdir()
    words = tuple("deep/out.h5" if word == "out.h5" else word for word in capture.words)
    begun = Capture(capture.folder, words, "deep/out.h5").begun(where)
    while not list(where.glob("deep/*.partial")):
        assert begun.poll() is None
    shutil.rmtree(where / "deep", ignore_errors=True)
    answer = begun.ended()
    check_refusal(answer, USAGE, INPUT)
    (where / "deep").mkdir(exist_ok=True)
    Capture(capture.folder, words, "deep/out.h5")
    capture.finished(where)


def test_a_file_in_the_place_of_a_folder(trace: Path) -> None:
    folder = trace.parent
    words = ["replay", trace, "-p", "h2o", "-b", "6", "-o"]
    (folder / "file").write_text("mine")
    check_refusal(kvreplay(*words, "file", folder=folder), USAGE)
    check_refusal(kvreplay(*words, "file/out", folder=folder), USAGE, INPUT)
    assert (folder / "file").read_text() == "mine"
    (folder / "out").mkdir()
    (folder / "out/cells").write_text("mine")
    check_refusal(kvreplay(*words, "out", folder=folder), USAGE, INPUT)
    assert (folder / "out/cells").read_text() == "mine"
    for taken in ("cells/fixture.h5", "results.csv", "run.json", "results.csv.partial"):
        (folder / "taken" / taken).mkdir(parents=True)
        (folder / "taken/cells").mkdir(exist_ok=True)
        check_refusal(kvreplay(*words, "taken", folder=folder), USAGE, INPUT)
        shutil.rmtree(folder / "taken")
    (folder / "gone").symlink_to(folder / "nowhere")
    check_refusal(kvreplay(*words, "gone", folder=folder), USAGE, INPUT)


@pytest.mark.parametrize("name", ["replay", "synth"])
def test_two_at_once(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """One of them writes; the other says that somebody does, or finds all done."""
    subject: Replay | Synth = request.getfixturevalue(name)
    for trial in range(2):
        where = subject.place(tmp_path / str(trial))
        processes = []
        for _ in range(3):
            processes.append(start(*subject.words, folder=where))
            time.sleep(0.01 * trial)
        answers = [Answer(process.wait(), "", process.communicate()[1]) for process in processes]
        assert any(answer.code == 0 for answer in answers), answers
        for answer in answers:
            if answer.code != 0:
                check_refusal(answer, USAGE, INPUT)
                assert "writing" in answer.err, answer
        subject.finished(where)


def test_two_captures_of_one_trace(capture: Capture, tmp_path: Path) -> None:
    where, other = capture.place(tmp_path / "one"), capture.place(tmp_path / "other")
    (other / "out.h5.partial").symlink_to(where / "out.h5.partial")
    answers: list[Answer] = []
    both = [threading.Thread(target=lambda at=at: answers.append(capture.ended(at))) for at in (where, other)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert any(answer.code == 0 for answer in answers), answers
    for answer in answers:
        if answer.code != 0:
            check_refusal(answer, INPUT)
    (where / "out.h5.partial").unlink(missing_ok=True)
    capture.finished(where)
