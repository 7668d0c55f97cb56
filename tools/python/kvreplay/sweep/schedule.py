"""Runs tasks on a Dask cluster, at most as many at a time as it has room for. A failed task is retried elsewhere.

Dask places and runs the tasks. This module decides how many run at a time and how often each is tried, and reports it.
"""

from __future__ import annotations

import csv
import os
import queue
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from kvreplay.errors import Error, Refusal
from kvreplay.sweep.work import Outcome, perform

if TYPE_CHECKING:
    from distributed import Client, Future

LOOK = 1.0  # seconds between looks at the cluster
GPU = "GPU"  # the resource of workers that have one


@dataclass(frozen=True)
class Task:
    """One call on some worker."""

    name: str
    cells: int  # its share of the work, as progress counts it
    file: Path  # what it reads: workers that name a folder above it come first
    call: Callable[..., Outcome]  # with the folders of `joins`
    joins: tuple[str, ...] = ()  # names of tasks that are done before it begins; it takes the place of their folders


@dataclass
class Record:
    """The state of a task: a row of tasks.csv."""

    name: str
    state: str = "waiting"  # waiting, running, done, failed
    attempts: int = 0
    worker: str = ""
    seconds: float = 0.0
    cells: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Worker:
    """One worker of the cluster: the facts that placing of tasks needs."""

    address: str
    room: int  # tasks at a time
    gpu: bool
    folders: tuple[Path, ...]  # resources that name a folder: what lies there is near

    @classmethod
    def of(cls, address: str, about: dict) -> Worker:
        resources = about.get("resources", {})
        room = min(about["nthreads"], int(resources.get(GPU, about["nthreads"])))
        return cls(address, room, GPU in resources, tuple(Path(name) for name in resources if name.startswith("/")))

    def is_near(self, file: Path) -> bool:
        return any(file.is_relative_to(folder) for folder in self.folders)


@dataclass
class Schedule:
    """All tasks of a sweep and their states. `changed` is called after every change, and every second; `ended` with the
    name of each task that is done and its folder."""

    tasks: Sequence[Task]
    retries: int
    changed: Callable[[Schedule], None] = lambda schedule: None
    ended: Callable[[str, str], None] = lambda name, folder: None
    records: dict[str, Record] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)  # by name of a finished task, the folder that it left
    begun: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # until the last task ended
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = {task.name: Record(task.name, cells=task.cells) for task in self.tasks}
        self._failed_on: dict[str, set[str]] = {task.name: set() for task in self.tasks}
        self._waiting = deque(task for task in self.tasks if not task.joins)
        self._joins = [task for task in self.tasks if task.joins]
        self._running: dict[Future, tuple[Task, frozenset[str]]] = {}  # with the workers that have its file
        self._ended: queue.SimpleQueue[Future] = queue.SimpleQueue()

    def run(self, client: Client) -> None:
        """Runs until every task is done or has failed finally. On an exception the running tasks are cancelled."""
        looked = 0.0
        self.begun = time.monotonic()
        try:
            while self._waiting or self._running:
                if time.monotonic() - looked >= LOOK:
                    self.workers = workers_of(client)
                    looked = time.monotonic()
                self._submit(client, self._fitting())
                self.changed(self)
                try:
                    self._end(self._ended.get(timeout=LOOK))
                    while not self._ended.empty():  # one submission for all workers that are free
                        self._end(self._ended.get())
                except queue.Empty:
                    continue
        finally:
            self.seconds = time.monotonic() - self.begun
            if self._running:
                client.cancel(list(self._running), force=True)
        self.changed(self)

    def _fitting(self) -> list[Task]:
        """The waiting tasks that the cluster has room for now, near their files where workers name them."""
        room = {worker.address: worker.room for worker in self._usable}
        taken = Counter(near for _, near in self._running.values())
        free = sum(room.values()) - taken.total()
        chosen: list[Task] = []
        if free <= 0:
            return chosen
        left: deque[Task] = deque()
        while self._waiting and len(chosen) < free:
            task = self._waiting.popleft()
            near = self._near(task)
            if near and taken[near] >= sum(room[address] for address in near):
                left.append(task)
            else:
                taken[near] += 1
                chosen.append(task)
        self._waiting.extendleft(reversed(left))
        return chosen

    @property
    def _usable(self) -> list[Worker]:
        """The workers that receive tasks: if some have a GPU, only these."""
        return [worker for worker in self.workers if worker.gpu] or self.workers

    def _near(self, task: Task) -> frozenset[str]:
        others = [worker for worker in self._usable if worker.folders]
        return frozenset(worker.address for worker in others
                         if worker.is_near(task.file) and worker.address not in self._failed_on[task.name])  # fmt: skip

    def _submit(self, client: Client, tasks: Sequence[Task]) -> None:
        """Dask needs less than half the time for tasks that it gets in one call."""
        batches: dict[tuple[str, ...], list[Task]] = {}
        for task in tasks:
            failed_on = self._failed_on[task.name]
            others = {worker.address for worker in self._usable if failed_on and worker.address not in failed_on}
            batches.setdefault(tuple(sorted(self._near(task) or others)), []).append(task)
        for wanted, batch in batches.items():
            futures = client.map(
                perform,
                [task.call for task in batch],
                [tuple(self.folders[name] for name in task.joins) for task in batch],
                # Never the same: an attempt that was given up may still run.
                key=[("kvreplay", task.name, uuid4().hex) for task in batch],
                workers=list(wanted) or None,
                allow_other_workers=bool(wanted),
                resources={GPU: 1} if any(worker.gpu for worker in self._usable) else None,
                pure=False,
            )
            for task, future in zip(batch, futures, strict=True):
                self._running[future] = task, self._near(task)
                record = self.records[task.name]
                record.state = "running"
                record.attempts += 1
                future.add_done_callback(self._ended.put)

    def _end(self, future: Future) -> None:
        task, _ = self._running.pop(future)
        record = self.records[task.name]
        outcome, where = outcome_of(future)
        record.worker, record.seconds, record.reason = outcome.worker or where, outcome.seconds, outcome.reason
        if outcome.ok:
            record.state = "done"
            for name in task.joins:
                shutil.rmtree(self.folders.pop(name), ignore_errors=True)
            self.folders[task.name] = outcome.folder
            self.ended(task.name, outcome.folder)
            for join in [join for join in self._joins if self.folders.keys() >= {*join.joins}]:
                self._joins.remove(join)
                self._waiting.appendleft(join)
        elif record.attempts <= self.retries:
            record.state = "waiting"
            if where:
                self._failed_on[task.name].add(where)
            self._waiting.append(task)
        else:
            record.state = "failed"

    def of_state(self, state: str) -> list[Record]:
        return [record for record in self.records.values() if record.state == state]


def workers_of(client: Client) -> list[Worker]:
    """The current workers of the scheduler; empty while it does not answer."""
    about = client.scheduler_info(n_workers=-1).get("workers", {})
    if client.status in ("closing", "closed"):  # Dask has waited for it in vain
        raise Error("--executor", "lost the connection to the scheduler", "the same command once it runs again", "",
                    Refusal.RESOURCES)  # fmt: skip
    return [Worker.of(address, one) for address, one in about.items()]


def outcome_of(future: Future) -> tuple[Outcome, str]:
    """The outcome of an attempt, and the address of its worker if it is known."""
    from distributed import CancelledError
    from distributed.scheduler import KilledWorker

    try:
        outcome: Outcome = future.result()
        return outcome, outcome.address
    except KilledWorker as lost:
        where = lost.last_worker.address
        return Outcome(False, "the worker died or could not be reached", worker=where), where
    except CancelledError:
        return Outcome(False, "the scheduler gave up on the task"), ""
    except Exception as problem:  # of the worker's own Python, of its disk ...
        return Outcome(False, f"{type(problem).__name__}: {problem}".split("\n")[0]), ""


def write_table(path: Path, records: Iterable[Record]) -> None:
    """Writes tasks.csv atomically: a reader gets the previous table or this one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [column.name for column in fields(Record)], lineterminator="\n")
        table.writeheader()
        for record in records:
            table.writerow(asdict(record) | {"seconds": f"{record.seconds:.3f}"})
    os.replace(partial, path)


def read_table(path: Path) -> dict[str, Record]:
    """The rows of tasks.csv by name; empty without this file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        return {}
    kinds = {"attempts": int, "seconds": float, "cells": int}
    return {row["name"]: Record(**{key: kinds.get(key, str)(value) for key, value in row.items()}) for row in rows}
