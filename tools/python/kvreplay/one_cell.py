"""Replays one policy at one budget on one trace, for programs that need its kept set alone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from kvreplay.engine import replay
from kvreplay.errors import Error
from kvreplay.trace import Trace

if TYPE_CHECKING:
    from kvreplay.results import Run


def one_cell(trace: Trace, policy: str, budget: str, **options: Any) -> tuple[Run, str]:
    """The run of this policy, without controls, and its cell. `options`: those of `kv.replay`. Raises Error with the
    reason if the cell fails."""
    # A trace that ends with its prompt has no continuation whose queries a replay could read.
    queries = "continuation" if trace.tokens > trace.prompt else "last:1"
    with warnings.catch_warnings(record=True) as said:
        run = replay(
            trace, policy, budget, metrics="kv_bytes", controls="none", eval=queries, observables="ignore",
            detail="summary", progress=False, **options,
        )  # fmt: skip
    cells = run.cells[run.cells["role"] == "asked"]
    if cells.empty:
        raise Error(policy, "replay", "a set", "; ".join(str(one.message) for one in said))
    return run, cells["cell"].iloc[0]
