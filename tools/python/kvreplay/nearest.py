"""An unknown name is answered with the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name closest to `name`, or all of them: for the `expected` of an error."""
    names = sorted(set(known))
    close = [one for one in names if name and one.startswith(name)] or difflib.get_close_matches(name, names, n=1)
    return close[0] if close else "one of " + ", ".join(names)
