"""Finds the nearest known name for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kvreplay.errors import SUGGESTION

MANY = 12  # names that are not enumerated where a command lists them
SHOWN = 3


def nearest(name: str, known: Iterable[str], command: str = "") -> str:
    """For the `expected` of an error: "did you mean NAME?" with the closest known name, or all known names. Of many,
    the three nearest and `command`, which lists all. Numbers are not close to each other."""
    names = sorted(set(known))
    close = [one for one in names if len(name) > 2 and name in one] or difflib.get_close_matches(name, names, n=1)
    if close and name.strip("0123456789.%"):
        return f"{SUGGESTION}{close[0]}?"
    if not command or len(names) <= MANY:
        return ("one of " if len(names) > 1 else "") + ", ".join(names)
    shown = difflib.get_close_matches(name, names, n=SHOWN, cutoff=0)
    return f"one of {len(names)} names, such as {', '.join(shown)} (see {command})"
