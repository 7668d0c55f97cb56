"""Which task goes where, how often, and what is told of it: with a cluster that only notes what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from distributed import CancelledError

from kvreplay.errors import Error
from kvreplay.sweep.schedule import Record, Schedule, Task, Worker, read_table, write_table
from kvreplay.sweep.work import Outcome


@dataclass(eq=False)
class Submitted:
    """A future, and how its task was submitted. What it answers is `ends` of the cluster."""

    name: str
    workers: list[str] | None
    allow_other_workers: bool
    resources: dict | None
    answer: Outcome | Exception
    folders: tuple[str, ...]

    def add_done_callback(self, heard: Callable[[Submitted], None]) -> None:
        heard(self)

    def result(self) -> Outcome:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass
class Noting:
    """A client: every task ends at once, as `ends` says of its attempts."""

    workers: dict[str, dict]
    status: str = "running"
    ends: dict[str, list[Outcome | Exception]] = field(default_factory=dict)
    submitted: list[Submitted] = field(default_factory=list)
    cancelled: list[Submitted] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)  # names of the tasks of each call

    def scheduler_info(self, n_workers: int) -> dict:
        return {"workers": self.workers}

    def map(
        self, function, calls: list, folders: list, key, workers, allow_other_workers, resources, pure
    ) -> list[Submitted]:
        first = len(self.submitted)
        for (_, name, _), joined in zip(key, folders, strict=True):
            answers = self.ends.get(name, [])
            answer = answers.pop(0) if answers else Outcome(True, folder=f"{name}-out", seconds=2.0)
            self.submitted.append(Submitted(name, workers, allow_other_workers, resources, answer, joined))
        self.batches.append([one.name for one in self.submitted[first:]])
        return self.submitted[first:]

    def cancel(self, futures: list[Submitted], force: bool) -> None:
        self.cancelled += futures


def tasks(*names: str, folder: str = "/data") -> list[Task]:
    return [Task(name, 10, Path(folder) / f"{name}.h5", lambda: Outcome(True)) for name in names]


def workers(count: int, **about: object) -> dict[str, dict]:
    return {f"tcp://{i}": {"nthreads": 1, "resources": {}, **about} for i in range(count)}


def test_all_are_done() -> None:
    seen: list[int] = []
    schedule = Schedule(tasks("a", "b", "c"), 3, lambda now: seen.append(len(now.of_state("running"))))
    client = Noting(workers(2))
    schedule.run(client)
    assert max(seen) == 2  # as many as there is room for
    assert {record.state for record in schedule.records.values()} == {"done"}
    assert list(schedule.folders.values()) == ["a-out", "b-out", "c-out"] and not client.cancelled
    assert [one.workers for one in client.submitted] == [None] * 3
    assert client.batches == [["a", "b"], ["c"]]


def test_a_failure_is_tried_again_elsewhere() -> None:
    fails = Outcome(False, "no disk", worker="host 0", address="tcp://0")
    schedule = Schedule(tasks("a"), 1)
    client = Noting(workers(3), ends={"a": [fails]})
    schedule.run(client)
    assert [(one.workers, one.allow_other_workers) for one in client.submitted] == [
        (None, False),
        (["tcp://1", "tcp://2"], True),
    ]
    assert schedule.records["a"] == Record("a", "done", 2, "", 2.0, 10, "")


def test_what_fails_every_time_is_marked_with_the_reason() -> None:
    fails = [Outcome(False, "no disk", worker="host 0", address="tcp://0"), ValueError("one\ntwo"), CancelledError()]
    schedule = Schedule(tasks("a", "b"), 2)
    client = Noting(workers(1), ends={"a": fails})
    schedule.run(client)
    assert [one.name for one in client.submitted] == ["a", "b", "a", "a"]
    assert (schedule.records["a"].state, schedule.records["a"].attempts) == ("failed", 3)
    assert schedule.records["a"].reason == "the scheduler gave up on the task"
    assert schedule.records["b"].state == "done" and schedule.folders == {"b": "b-out"}


def test_traces_go_to_workers_that_name_their_folder() -> None:
    about = workers(3)
    about["tcp://1"]["resources"] = {"/data/near": 1.0}
    client = Noting(about)
    near = tasks("a", "b", folder="/data/near") + tasks("c", "d", folder="/data/nearer")
    Schedule(near, 0).run(client)
    placed = {one.name: one.workers for one in client.submitted}
    assert placed == {"a": ["tcp://1"], "b": ["tcp://1"], "c": None, "d": None}
    assert [one.name for one in client.submitted][:3] == ["a", "c", "d"]  # b waits for room near its file


def test_one_gpu_each() -> None:
    about = workers(3)
    about["tcp://0"] |= {"nthreads": 4, "resources": {"GPU": 1.0}}
    assert Worker.of("tcp://0", about["tcp://0"]).room == 1
    client = Noting(about)
    Schedule(tasks("a", "b"), 0).run(client)
    assert [one.resources for one in client.submitted] == [{"GPU": 1}] * 2


def in_groups(folder: Path) -> tuple[list[Task], dict[str, list[Outcome | Exception]]]:
    """A trace in two groups and what joins them; each leaves a folder."""
    groups = tasks("a 1/2", "a 2/2")
    left = [folder / str(i) for i in range(2)]
    for one in left:
        one.mkdir()
    ends = {task.name: [Outcome(True, folder=str(one))] for task, one in zip(groups, left, strict=True)}
    return [*groups, Task("a", 0, Path("/"), lambda *_: Outcome(True), ("a 1/2", "a 2/2")), *tasks("b")], ends


def test_groups_are_joined_when_all_are_done(tmp_path: Path) -> None:
    work, ends = in_groups(tmp_path)
    client = Noting(workers(1), ends=ends)
    schedule = Schedule(work, 0)
    schedule.run(client)
    assert [one.name for one in client.submitted] == ["a 1/2", "a 2/2", "a", "b"]
    assert client.submitted[2].folders == (str(tmp_path / "0"), str(tmp_path / "1"))
    assert schedule.folders == {"a": "a-out", "b": "b-out"} and not list(tmp_path.iterdir())


def test_groups_are_not_joined_when_one_fails(tmp_path: Path) -> None:
    work, ends = in_groups(tmp_path)
    ends["a 2/2"] = [ValueError("no disk")]
    schedule = Schedule(work, 0)
    schedule.run(Noting(workers(1), ends=ends))
    assert {record.name: record.state for record in schedule.records.values()} == {
        "a 1/2": "done", "a 2/2": "failed", "a": "waiting", "b": "done"}  # fmt: skip
    assert schedule.folders == {"a 1/2": str(tmp_path / "0"), "b": "b-out"}


def test_stopped_early() -> None:
    def stop(now: Schedule) -> None:
        if now.of_state("running"):
            raise KeyboardInterrupt

    client = Noting(workers(2))
    with pytest.raises(KeyboardInterrupt):
        Schedule(tasks("a", "b", "c"), 0, stop).run(client)
    assert [one.name for one in client.cancelled] == ["a", "b"]


def test_a_scheduler_that_is_gone() -> None:
    with pytest.raises(Error, match="--executor: lost the connection to the scheduler: expected the same command"):
        Schedule(tasks("a"), 3).run(Noting(workers(1), status="closed"))


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    records = [Record('a, "b"', "done", 2, "host 1", 1.25, 80, ""), Record("c", "failed", 4, "", 0.0, 80, "no\ndisk")]
    write_table(tmp_path / "tasks.csv", records)
    assert list(read_table(tmp_path / "tasks.csv").values()) == records
    assert read_table(tmp_path / "none.csv") == {}
