"""Is too little memory one line with exit code 5 that says how much is too little, and never a crash?"""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest
from program import PROGRAM, done, kvreplay
from subjects import Replay

RESOURCES = 5
MIB = 1 << 20


def test_a_budget_that_the_least_plan_exceeds(replay: Replay, tmp_path: Path) -> None:
    where = replay.place(tmp_path / "small")
    for size in ("1", "64KiB", "1MiB"):
        answer = kvreplay(*replay.words, "--memory", size, folder=where)
        assert answer.code == RESOURCES, answer
        assert answer.err.startswith("kvreplay: --memory: too little memory for the plan: expected at least "), answer
        assert not (where / "out").exists()
    replay.finished(where)


@pytest.fixture(scope="session")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The address space in MiB that the program's own libraries leave something of."""
    for size in range(8, 4096, 2):
        limits = (size * MIB, size * MIB)
        ended = subprocess.run(
            [PROGRAM, "--version"], capture_output=True,
            preexec_fn=lambda limits=limits: resource.setrlimit(resource.RLIMIT_AS, limits),
        )  # fmt: skip
        if ended.returncode in (0, RESOURCES):
            return size
    raise AssertionError("the program does not start")


def test_an_address_space_that_is_too_small(replay: Replay, least: int, some: int, tmp_path: Path) -> None:
    """Step by step: it is refused until it is enough, with sizes, and the results are those of any other run."""
    done_at = 0
    many = replay.on_threads(8)
    refusals = set()
    for size in range(least + 2, least + 1024, 1 if some == 1 else 16):
        where = many.place(tmp_path / str(size))
        answer = many.ended(where, limits={resource.RLIMIT_AS: size * MIB})
        if answer.code == 0:
            done_at = done_at or size
            assert done("diff", replay.whole, where / "out", folder=where) == "equal\n"
            if size > done_at + 24:
                break
            continue
        assert answer.code == RESOURCES and answer.err.startswith("kvreplay: ") and answer.err.count("\n") == 1, answer
        assert not (where / "out").exists() or list((where / "out").rglob("*.*")) == []
        refusals.add(answer.err.split(":")[1])
    assert done_at and refusals & {" address space", " memory"}


def test_threads_that_the_system_does_not_grant(replay: Replay, tmp_path: Path) -> None:
    """Fewer do the same work."""
    stack = 1 << 40  # of each thread: none can be made
    where = replay.place(tmp_path / "threads")
    many = replay.on_threads(8)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard not in (resource.RLIM_INFINITY, -1) and hard < stack:
        pytest.skip("no stacks of such a size may be asked for")
    answer = many.ended(where, limits={resource.RLIMIT_STACK: stack, resource.RLIMIT_AS: 4096 * MIB})
    assert (answer.code, answer.err) == (0, ""), answer
    assert done("diff", replay.whole, where / "out", folder=where) == "equal\n"
