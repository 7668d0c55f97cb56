"""The program under test, as its users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(os.environ.get("KVREPLAY", Path(__file__).parents[2] / "build" / "release" / "kvreplay")).resolve()

# kvreplay-python, which the program hands command lines to, is installed beside the interpreter.
WITH_PYTHON = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@dataclass(frozen=True)
class Answer:
    """What the program said: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


def start(*words: str | Path, folder: Path, **settings: object) -> subprocess.Popen[str]:
    """The program started with `words` in `folder`."""
    command = [str(PROGRAM), *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", **settings)


def kvreplay(*words: str | Path, folder: Path, **settings: object) -> Answer:
    """Run the program with `words` in `folder` until it ends."""
    process = start(*words, folder=folder, **settings)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return Answer(process.returncode, out, err)


def done(*words: str | Path, folder: Path) -> str:
    """Stdout of a run that must succeed without a word on stderr."""
    answer = kvreplay(*words, folder=folder)
    assert (answer.code, answer.err) == (0, ""), answer
    return answer.out
