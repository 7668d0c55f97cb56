"""Progress of a capture on stderr: a bar on a terminal, plain lines in a pipe or a log."""

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

    def __init__(self, prompt: str, layers: int) -> None:
        self._prompt, self._layers, self._finished, self._printed = prompt, layers, 0, -SECONDS_BETWEEN_LINES

    def update(self) -> None:
        self._finished += 1
        now = time.monotonic()
        if self._finished == self._layers or now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            say_notes("capture", [f"{self._prompt}: {self._finished} of {self._layers} layers written"])

    def close(self) -> None:
        pass


def progress_of(prompt: str, layers: int, arguments: argparse.Namespace) -> Any:
    """The progress of a prompt's layers; of each chunk of tokens, where the capture is chunked."""
    if arguments.progress == "auto" and not shows_progress(arguments):
        return PlainLines(prompt, layers)
    from tqdm import tqdm

    return tqdm(total=layers, unit=" layers", desc=prompt, disable=arguments.progress == "never", file=sys.stderr)
