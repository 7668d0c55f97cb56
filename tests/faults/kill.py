#!/usr/bin/env python3
"""Kills replays and captures at random moments, goes on with each, and compares the end with an undisturbed run.

    tests/faults/kill.py [--kills 100 | --seconds N] [--of replay,merge,synth,capture] [--seed N]

--kills: so many of each; --seconds: for so long, in turn. A line about each kill goes to build/faults/kill-DATE.log; a
program that is called again continues the last log, with the kills that are still missing. Exit code 1: a result was
another than the undisturbed one.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / other) for other in ("cli", "capture")]

from subjects import Capture, Merge, Replay, Subject, Synth  # noqa: E402

KINDS: dict[str, type[Replay]] = {"replay": Replay, "merge": Merge, "synth": Synth, "capture": Capture}
IN_A_ROW = 4  # kills before a run may end


def left(where: Path) -> str:
    """The files that a kill has left, but what was given."""
    names = (path for path in where.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "log")
    return " ".join(sorted(str(path.relative_to(where)) for path in names)) or "nothing"


def kill(subject: Subject, where: Path, lasts: float, chance: random.Random, kills: int) -> list[str]:
    """So many times killed in one folder, then finished and compared; what happened each time."""
    happened = []
    subject.place(where)
    while len(happened) < kills:
        after = chance.uniform(0, lasts)
        answer = subject.begun(where).killed_after(after)
        if answer.code == -signal.SIGKILL:
            happened.append(f"killed after {1000 * after:.0f} ms, left {left(where)}")
        elif answer.code != 0:
            raise AssertionError(f"ended by itself: {answer}")
        else:
            lasts *= 0.98  # the end came first: what is left to do takes less time
            if subject.words[0] == "replay":  # or there is nothing left to do
                shutil.rmtree(where)
                subject.place(where)
    subject.finished(where)
    shutil.rmtree(where)
    return happened


def duration(subject: Subject, where: Path) -> float:
    subject.place(where)
    begin = time.monotonic()
    subject.finished(where)
    shutil.rmtree(where)
    return time.monotonic() - begin


class Log:
    """build/faults/kill-DATE.log, of which the last is continued while kills are missing."""

    def __init__(self, kinds: list[str], kills: int) -> None:
        folder = HERE.parents[1] / "build" / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        before = sorted(folder.glob("kill-*.log"))
        self.path = folder / f"kill-{datetime.now(UTC):%Y-%m-%dT%H%M%S}.log"
        if before and any(self._counted(before[-1], kind) < kills for kind in kinds):
            self.path = before[-1]

    @staticmethod
    def _counted(path: Path, kind: str) -> int:
        return path.read_text().count(f" {kind}: killed") if path.exists() else 0

    def kills(self, kind: str) -> int:
        return self._counted(self.path, kind)

    def add(self, kind: str, lines: list[str]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {kind}: {line}\n" for line in lines)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seconds", type=float)
    options.add_argument("--of", default="replay,capture")
    options.add_argument("--seed", type=int)
    asked = options.parse_args()
    kinds = asked.of.split(",")
    chance = random.Random(asked.seed)
    log = Log(kinds, asked.kills)
    until = time.monotonic() + (asked.seconds or 1e9)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kill-") as scratch:
        subjects, durations = {}, {}
        for kind in kinds:
            (Path(scratch) / kind).mkdir()
            subjects[kind] = KINDS[kind].prepared(Path(scratch) / kind)
            durations[kind] = duration(subjects[kind], Path(scratch) / "timed")
        while time.monotonic() < until:
            missing = [kind for kind in kinds if asked.seconds or log.kills(kind) < asked.kills]
            if not missing:
                break
            kind = min(missing, key=log.kills)
            row = chance.randint(1, IN_A_ROW)
            try:
                log.add(kind, kill(subjects[kind], Path(scratch) / "trial", durations[kind], chance, row))
            except AssertionError as difference:
                wrong += 1
                log.add(kind, [f"WRONG: {difference}"])
                shutil.rmtree(Path(scratch) / "trial")
    print(*(f"{kind}: {log.kills(kind)} kills" for kind in kinds), f"{wrong} wrong results", log.path, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
