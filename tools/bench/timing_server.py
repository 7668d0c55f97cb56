"""kvreplay_bench as a partner: it times its cases on request, and waits without using a core in between."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

PAUSE = 0.12  # seconds between two candidates: threads that wait actively have gone to sleep by then


def best_cases(names: list[str], pattern: str) -> list[str]:
    """Of each subject and shape the first level's case with all threads: what users run. Levels come best first,
    threads ascending."""
    best: dict[str, str] = {}
    for name in filter(re.compile(pattern).search, names):
        data, level, _ = name.rsplit("/", 2)
        if data not in best or best[data].split("/")[-2] == level:
            best[data] = name
    return list(best.values())


class TimingServer:
    """One process that holds the data of the case asked for last."""

    def __init__(self, program: Path, *options: str) -> None:
        command = [str(program), "--serve", *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> TimingServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"kvreplay_bench ended at {request!r}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{request}: {answer['error']}")
        return answer

    def cases(self) -> list[str]:
        return self._ask("list")["cases"]

    def problem(self, case: str) -> str:
        """What float64 finds wrong with the case's answer; empty: nothing."""
        return self._ask(f"check {case}")["problem"]

    def seconds(self, case: str, calls: int = 1) -> float:
        """Mean seconds of a call, after a pause."""
        time.sleep(PAUSE)
        return float(np.mean(self._ask(f"time {case} {calls}")["seconds"]))

    def result(self, case: str) -> np.ndarray:
        """The case's answer as flat float64."""
        with tempfile.NamedTemporaryFile(suffix=".f64") as file:
            self._ask(f"result {case} {file.name}")
            return np.fromfile(file.name)
