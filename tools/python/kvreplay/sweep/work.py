"""The work for one task: a worker runs a program in a separate folder and reports the outcome.

A worker imports this module, so it needs kvreplay and dask, and no other package of ours.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

from kvreplay.errors import Refusal

if TYPE_CHECKING:
    from distributed import Worker

DONE, SOME_FAILED = 0, int(Refusal.SOME_FAILED)  # exit codes of a replay that leaves results
LOOK = 0.5  # seconds between looks whether the task is still wanted
ENDING = ("closing", "closed", "stopping", "stopped", "failed")  # a worker that takes no results to anybody
PDEATHSIG = 1  # of prctl
# Dask sets it for its workers: free memory returns to the system at once. A replay needs 4 % more time with it.
DASK_MEMORY_VARIABLE = "MALLOC_TRIM_THRESHOLD_"
_libc = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended."""

    ok: bool
    reason: str = ""  # why not, or what failed of it
    folder: str = ""  # what it left
    seconds: float = 0.0
    worker: str = ""  # host and name
    address: str = ""  # of the worker in its cluster


@dataclass(frozen=True)
class Allowance:
    """Limits of the program of one task; None: those of its worker."""

    threads: int | None = None
    memory: int | None = None  # bytes

    def words(self, memory_of_worker: int) -> list[str]:
        memory = self.memory or memory_of_worker
        return ["--threads", str(self.threads or 1), *(["--memory", str(memory)] if memory else [])]


@dataclass(frozen=True)
class Replay:
    """One trace with all or some of its policies, at all budgets, into a new folder below `shards`."""

    command: tuple[str, ...]  # the program, and the words of a replay
    directory: str  # in which relative paths of these words mean something
    trace: str
    name: str  # of the task
    shards: str
    earlier: str  # the file of this trace's cells of earlier sweeps, which are not computed again
    allowance: Allowance

    def __call__(self) -> Outcome:
        folder = new_folder(self.shards, self.name)
        cells = folder / "cells"
        cells.mkdir(parents=True)
        if Path(self.earlier).is_file():
            shutil.copyfile(self.earlier, cells / Path(self.earlier).name)
        words = [*self.command, self.trace, "-o", str(folder), *self.allowance.words(memory_of_worker())]
        return leave_results(folder, words, self.directory)


@dataclass(frozen=True)
class Join:
    """Joins the results of several tasks of one trace in a new folder below `shards`."""

    program: tuple[str, ...]
    name: str  # of the trace
    shards: str

    def __call__(self, *folders: str) -> Outcome:
        folder = new_folder(self.shards, self.name)
        return leave_results(folder, [*self.program, "merge", str(folder), *folders], self.shards)


def perform(call: Callable[..., Outcome], folders: Sequence[str]) -> Outcome:
    return call(*folders)


def new_folder(shards: str, name: str) -> Path:
    """A new folder for one attempt, since an earlier attempt on an unreachable worker may still write to its own."""
    return Path(shards) / f"{name.replace('/', 'of')}-{uuid4().hex[:12]}"


def leave_results(folder: Path, words: Sequence[str], directory: str) -> Outcome:
    """Runs a program that writes results into a folder."""
    begin = time.monotonic()
    code, said = run_program([*words, "--progress", "never"], directory, unwanted())
    ok = code in (DONE, SOME_FAILED)
    if not ok:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(ok, "" if code == DONE else said, str(folder), time.monotonic() - begin, *names_of_worker())


@dataclass(frozen=True)
class Capture:
    """One prompt of a capture: the trace is renamed to its name when it is complete."""

    command: tuple[str, ...]  # the program, and the words of a capture without -o
    directory: str
    name: str  # of the prompt
    output: str  # folder of traces

    def __call__(self) -> Outcome:
        begin = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f".{self.name}-", dir=self.output))
        try:
            words = [*self.command, "--only", self.name, "-o", str(folder), "--progress", "never"]
            code, said = run_program(words, self.directory, unwanted())
            trace = Path(self.output) / f"{self.name}.h5"
            if code == DONE:
                os.replace(folder / trace.name, trace)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        seconds = time.monotonic() - begin
        return Outcome(code == DONE, "" if code == DONE else said, str(trace), seconds, *names_of_worker())


def run_program(words: Sequence[str], directory: str, stop: Callable[[], bool]) -> tuple[int, str]:
    """The exit code, and the last line of stderr. The program is killed when this process ends or `stop` is true."""
    environment = {name: value for name, value in os.environ.items() if name != DASK_MEMORY_VARIABLE}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            words, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=said, process_group=0, preexec_fn=dies_with(os.getpid()),
        )  # fmt: skip
        try:
            _wait(process, stop)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return process.returncode, _reason(process.returncode, said)


def dies_with(parent: int) -> Callable[[], None]:
    """Prepares a program before it starts: it is killed when the process `parent` ends."""

    def prepare() -> None:
        _libc.prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it was watched
            os._exit(1)

    return prepare


def _wait(process: subprocess.Popen[bytes], stop: Callable[[], bool]) -> None:
    """Waits until the program ends or `stop` is true: its results are no longer needed."""
    ended = os.pidfd_open(process.pid)
    try:
        while not select.select([ended], [], [], LOOK)[0]:
            if stop():
                return
    finally:
        os.close(ended)


def _reason(code: int, said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode("utf-8", "replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "").removeprefix("kvreplay: ")
    if code < 0:
        end = f"ended by {signal.Signals(-code).name}"
        return f"{end}, as a system out of memory does" if -code == signal.SIGKILL else end
    return last or f"exit code {code}"


def this_worker() -> Worker | None:
    """The Dask worker that runs the task of this thread; None outside workers."""
    try:
        from distributed import get_worker

        return get_worker()
    except (ImportError, ValueError):
        return None


def unwanted() -> Callable[[], bool]:
    """Whether the running task was cancelled or its worker is about to end; outside workers False."""
    worker = this_worker()
    if worker is None:
        return lambda: False
    key = worker.get_current_task()

    def asked() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state == "cancelled" or worker.status.name in ENDING

    return asked


def names_of_worker() -> tuple[str, str]:
    """The host and the worker's name, and its address."""
    worker, host = this_worker(), socket.gethostname()
    return (f"{host} {worker.name}", worker.address) if worker else (host, "")


def memory_of_worker() -> int:
    """Bytes of the worker's memory that one task may use; 0: no limit."""
    worker = this_worker()
    return int((worker.memory_manager.memory_limit or 0) / worker.state.nthreads) if worker else 0
