"""The program kvreplay inside Python, where policies in Python are: kvreplay-python COMMAND …"""

from __future__ import annotations

import sys

from kvreplay.program import exit_code

USAGE = """kvreplay python COMMAND ...
  Runs any command of kvreplay with policies written in Python. All commands
  call it for a policy -p FILE.py:NAME.
  kvreplay help COMMAND prints the options of a command.

examples
  kvreplay python replay TRACE.h5 -p mine.py:my_policy,snapkv -b 0.1
"""


def run(words: list[str]) -> int:
    """Does what the command line says; the exit code. The program itself hands over `watch PROGRAM replay …`."""
    if words in ([], ["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    if words[:1] == ["watch"]:
        from kvreplay.command_line.watch import watch

        return watch(words[1], words[2:])
    from kvreplay import engine

    return engine.program(words)


def main() -> int:
    """The exit code."""
    return exit_code("python", lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
