"""Progress of a model's work on stderr: a bar on a terminal, plain lines in a pipe or a log."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kvreplay.capture.model_options import shows_progress
from kvreplay.program import say_notes

SECONDS_BETWEEN_LINES = 5.0


class PlainLines:
    """Has the methods of a bar: prints the first and the last step, and others at most every SECONDS_BETWEEN_LINES."""

    def __init__(self, command: str, name: str, steps: int, done: str) -> None:
        """`done`: the steps and their end, such as "layers written"."""
        self._command, self._name, self._steps, self._done = command, name, steps, done
        self._finished, self._printed = 0, -SECONDS_BETWEEN_LINES

    def update(self) -> None:
        self._finished += 1
        now = time.monotonic()
        if self._finished == self._steps or now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            say_notes(self._command, [f"{self._name}: {self._finished} of {self._steps} {self._done}"])

    def set_description(self, name: str) -> None:
        self._name = name

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass


def progress_of(command: str, done: str, name: str, steps: int, *, arguments: argparse.Namespace) -> Any:
    """The progress of the layers of a prompt (of each chunk of tokens, where the capture is chunked), or of the cells
    of a trace. `name`: of the prompt or trace; `done` as in PlainLines."""
    if arguments.progress == "auto" and not shows_progress(arguments):
        return PlainLines(command, name, steps, done)
    from tqdm import tqdm

    never = arguments.progress == "never"
    return tqdm(total=steps, unit=f" {done.split()[0]}", desc=name, disable=never, file=sys.stderr)


def hidden(name: str, steps: int) -> Any:
    """A bar that shows nothing."""
    from tqdm import tqdm

    return tqdm(total=steps, desc=name, disable=True)
