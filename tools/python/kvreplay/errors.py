"""The one error type of the Python tools: where, what, expected, found, and the exit code of the program."""

from __future__ import annotations

import errno
from enum import IntEnum

DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
# Of a message that is one line whatever the text, as the engine's.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n"}


class Refusal(IntEnum):
    """The reason of an error; the value is the program's exit code."""

    NO = 1  # done, and the answer is "no"
    USAGE = 2  # a flag, name or value that cannot be meant
    INPUT = 3  # a file or model that cannot be read, or that lacks what is needed
    CAPABILITY = 4  # this machine cannot do it: an optional package is missing
    RESOURCES = 5  # memory or disk would not suffice
    SOME_FAILED = 6  # finished, but some cells failed: they are listed
    INTERNAL = 70  # a bug of ours
    INTERRUPTED = 130  # the user stopped the program
    UNREAD = 141  # who reads the output left before its end


SUGGESTION = "did you mean "  # begins the `expected` of an unknown name that has a near one


class Error(Exception):
    """One line, `WHERE: WHAT: expected EXPECTED, found FOUND`, or `WHERE: WHAT FOUND: did you mean NAME?` with an
    `expected` of `nearest`. Empty pieces are left out."""

    def __init__(
        self, where: str, what: str, expected: str = "", found: str = "", exit_code: int = Refusal.INPUT
    ) -> None:
        self.where = where
        self.what = what
        self.expected = expected
        self.found = found
        self.exit_code = int(exit_code)
        if expected.startswith(SUGGESTION):
            named = "" if where.endswith(found) else f" {found}".rstrip()
            super().__init__(f"{where}: {what}{named}: {expected}".translate(CONTROLS))
            return
        pieces = [f"{verb} {value}" for verb, value in (("expected", expected), ("found", found)) if value]
        super().__init__(": ".join(filter(None, (where, what, ", ".join(pieces)))).translate(CONTROLS))
