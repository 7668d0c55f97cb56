"""The folder of a finished run: checked before the packages that read its tables are imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvreplay.errors import Error

RUN_FILES = ("results.csv", "cells", "run.json")


def without_live(folders: Iterable[Path]) -> Error:
    """The error of runs whose cells no model has run with."""
    return Error(
        ", ".join(map(str, folders)), "nothing to predict", "a run measured by kvreplay live RUN", "no live.csv"
    )


def require_run(folder: Path) -> None:
    """Rejects a folder that is no finished run, or a run of format 1, whose sets are in selections.h5."""
    if folder.is_file():
        raise Error(str(folder), "not a run", f"kvreplay replay {folder} -o RUN, then RUN", "a file")
    if not folder.exists():
        raise Error(str(folder), "not a finished run", ", ".join(RUN_FILES), "no such folder")
    if not (folder / "cells").exists() and any((folder / name).exists() for name in ("parts", "selections.h5")):
        raise Error(str(folder), "results of format 1; convert them with kvreplay merge NEW OLD", "")
    for name in RUN_FILES:
        if not (folder / name).exists():
            raise Error(str(folder), "not a finished run", ", ".join(RUN_FILES), f"no {name}")
