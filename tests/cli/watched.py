"""A replay under --watch, for tests."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from program import PROGRAM, WITH_PYTHON

PATIENCE = 60  # seconds


class Watched:
    """A replay under --watch whose output is read as it comes."""

    def __init__(self, folder: Path, *words: str | Path) -> None:
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "replay", "trace.h5", "-b", "0.1", "-o", "run", "--watch", *map(str, words)],
                cwd=folder, env=WITH_PYTHON, stdout=log, stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
            )  # fmt: skip

    def replays(self, count: int) -> list[str]:
        """What each of so many replays printed."""
        until = time.monotonic() + PATIENCE
        while (parts := self.log.read_text().split("; watching "))[:-1][count - 1 :] == []:
            assert time.monotonic() < until and self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return parts


@contextmanager
def watching(folder: Path, *words: str | Path) -> Iterator[Watched]:
    """Of trace.h5 in the folder, at 0.1, into `run`."""
    found = Watched(folder, *words)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
