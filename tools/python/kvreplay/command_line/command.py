"""The program kvreplay inside Python, where policies in Python are: kvreplay-python COMMAND …"""

from __future__ import annotations

import sys

from kvreplay.errors import Error, Refusal
from kvreplay.program import exit_code


def run(words: list[str]) -> int:
    """Does what the command line says; the exit code."""
    from kvreplay import engine
    from kvreplay.command_line.watch import watch

    if words[:1] == ["replay"] and "--watch" in words:
        return watch(words)
    if any(word.startswith("--plugin") for word in words):
        # A plug-in calls the program that loads it; what it could call here is beside the HDF5 that h5py brings along.
        what, expected = "beside a policy in Python", "two command lines with one output folder"
        raise Error("--plugin", what, expected, "", Refusal.CAPABILITY)
    return engine.program(words)


def main() -> int:
    """The exit code."""
    codes: list[int] = []
    refused = exit_code("python", lambda: codes.append(run(sys.argv[1:])))
    return refused or codes[0]


if __name__ == "__main__":
    sys.exit(main())
