"""A sweep as its users start it, with a program that can be made to fail, and a cluster as somebody starts one."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
from program import PROGRAM, Answer, kvreplay

from kvreplay.sweep.command import main

NAMES = ["t0", "t1", "t2", "t3"]
ASKED = ["-p", "snapkv,h2o", "-b", "0.1,0.2"]
CELLS = 2 * (2 + 3)  # of each trace: two policies and the controls at two budgets
SETTINGS = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0", "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False"}


def wait_for(what: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def assert_equal(run: Path, single: Path) -> None:
    """Rows by their bytes, datasets by their bits."""
    assert (run / "results.csv").read_bytes() == (single / "results.csv").read_bytes()
    answer = kvreplay("diff", run, single, folder=run)
    assert (answer.code, answer.err) == (0, ""), answer


def table(run: Path) -> dict[str, dict[str, str]]:
    with (run / "tasks.csv").open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@dataclass
class Sweeps:
    """The command in `folder`. Its program is the real one behind a script, which notes every replay of a task in
    `calls`, and before that does what `fault` says in the words of a shell: $name is the trace's, $$ the program."""

    folder: Path
    operands: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.folder / "bin" / "kvreplay"
        program.parent.mkdir()
        program.write_text(
            f"""#!/bin/bash
if [[ "$*" == *" -o {self.output}/shards/"* && "$1" == replay ]]; then
  words="$*"; name="${{words##*{self.output}/shards/}}"; name="${{name%%-*}}"
  echo "$name" >>{self.folder}/calls
  [ ! -e {self.folder}/fault ] || . {self.folder}/fault
fi
exec {PROGRAM} "$@"
"""
        )
        program.chmod(0o755)
        self.environment = os.environ | SETTINGS | {"PATH": f"{program.parent}:{os.environ['PATH']}"} | self.environment

    @property
    def output(self) -> Path:
        return self.folder / "out"

    def fault(self, shell: str) -> None:
        (self.folder / "fault").write_text(shell)

    def fault_once(self, name: str, shell: str) -> None:
        """In the first attempt of a trace."""
        self.fault(f'[ "$name" = "{name}" ] && mkdir {self.folder}/met 2>/dev/null && {{ {shell}; }}')

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvreplay.sweep.command", *self.operands, "-o", str(self.output)]
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *map(str, words)], cwd=self.folder, env=self.environment, stdout=pipe,
                                stderr=pipe, text=True, start_new_session=True)  # fmt: skip

    def run(self, *words: object) -> Answer:
        """In this process, which has imported Dask already."""
        asked = [*self.operands, "-o", str(self.output), *map(str, words)]
        before = signal.getsignal(signal.SIGTERM)
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(StringIO()) as out,
            redirect_stderr(StringIO()) as err,
        ):
            patch.setenv("PATH", self.environment["PATH"])
            patch.chdir(self.folder)
            try:
                code = main(asked)
            finally:
                signal.signal(signal.SIGTERM, before)
        return Answer(code, out.getvalue(), err.getvalue())

    def run_apart(self, *words: object) -> Answer:
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        return Answer(process.returncode, out, err)


@dataclass
class Cluster:
    """A scheduler and workers, as somebody would start them."""

    address: str
    processes: list[subprocess.Popen]
    folder: Path
    environment: dict[str, str]

    @classmethod
    def started(cls, folder: Path, host: str = "127.0.0.1", settings: Mapping[str, str] = SETTINGS) -> Cluster:
        about = folder / "scheduler.json"
        made = cls("", [], folder, os.environ | settings)
        made._start("scheduler", "--host", host, "--port", "0", "--scheduler-file", str(about))
        wait_for(lambda: about.exists() and about.read_text().endswith("}"))
        made.address = json.loads(about.read_text())["address"]
        return made

    def worker(self, before: Sequence[str] = (), host: str = "127.0.0.1") -> None:
        """With a nanny: where it dies it is started again. `before`: words that take the command to another host."""
        self._start("worker", self.address, "--nthreads", "1", "--nanny", "--host", host,
                    "--local-directory", str(self.folder), before=before)  # fmt: skip

    def _start(self, what: str, *words: str, before: Sequence[str] = ()) -> None:
        command = [*before, sys.executable, "-m", f"distributed.cli.dask_{what}", "--no-dashboard", *words]
        quiet = subprocess.DEVNULL
        self.processes.append(
            subprocess.Popen(command, env=self.environment, stdout=quiet, stderr=quiet, start_new_session=True)
        )
