"""Finds the nearest known name for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kvreplay.errors import SUGGESTION


def nearest(name: str, known: Iterable[str]) -> str:
    """For the `expected` of an error: "did you mean NAME?" with the closest known name, or all known names."""
    names = sorted(set(known))
    close = [one for one in names if len(name) > 2 and name in one] or difflib.get_close_matches(name, names, n=1)
    return f"{SUGGESTION}{close[0]}?" if close else "one of " + ", ".join(names)
