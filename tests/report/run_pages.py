"""A page written, and a run's sets read without the report."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import h5py
import numpy as np

from kvreplay.report.command import main

TRACE = Path(__file__).resolve().parents[2] / "traces" / "smollm2-135m-needle.h5"
POLICIES = "snapkv,snapkv:heads=query,chunkkv,h2o-online,kivi,sca:schedule=threshold(0.5,0.25),recent=8,sinks=4"


@cache
def opened(run: Path) -> h5py.File:
    """The cells of a run of one trace, read as the report reads them: without a lock."""
    [path] = (run / "cells").iterdir()
    return h5py.File(path, locking=False)


def cell_of(run: Path, policy: str, heads: str, budget: str) -> h5py.Group:
    """The cell of a policy; where it stands in a run with several parameters, `heads` tells them apart."""
    wanted = (policy, heads, budget)
    cells = opened(run)["cells"].values()
    [found] = [c for c in cells if tuple(c.attrs[key].decode() for key in ("policy", "heads", "budget")) == wanted]
    return found


def kept_by(run: Path, policy: str, heads: str, budget: str, tokens: int = 480) -> np.ndarray:
    """bool [L,H,tokens] of a cell, row by row."""
    cell = cell_of(run, policy, heads, budget)
    layers, rows = cell["budget"].shape
    kept = np.zeros((layers * rows, tokens), dtype=bool)
    offsets, positions = cell["offsets"][()], cell["positions"][()]
    for row in range(layers * rows):
        kept[row, positions[offsets[row] : offsets[row + 1]]] = True
    if cell.attrs.get("sets") == b"all":
        kept[:] = True
    return kept.reshape(layers, rows, tokens)


def write_report(run: Path, *options: str) -> Path:
    """The page of a run, beside it."""
    page = run.with_name(run.name + "-".join(options).replace("/", "") + ".html")
    assert main([str(run), "-o", str(page), *options]) == 0
    return page
