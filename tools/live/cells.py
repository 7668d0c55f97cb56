"""Cells of a run whose sets can be held in the live model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from kvreplay.engine import decision_and_store
from kvreplay.live.attention import NEVER
from kvreplay.results import COLUMNS, NUMBERS, Run, Selection, TraceFacts

# What the column `decisions` says: whether the sets are those of a live system.
DECISIONS = {
    "after-prefill": "after-prefill",  # they are, bit for bit
    "during-prefill": "replayed",  # decided by what the full cache shows; live, later tokens would have seen less
    "future": "future",  # of a control that reads later queries
    "never": "none",  # all tokens are held
}


@dataclass(frozen=True)
class LiveCell:
    """What one cell of a trace holds, by the model's own number of each layer; other layers hold all."""

    facts: dict[str, str]  # columns of results.csv that all its rows share
    label: str
    decisions: str
    kept: dict[int, torch.Tensor]  # bool [1 | Hkv | Hq, P]
    leaves: dict[int, torch.Tensor] | None  # int64 [1 | Hkv | Hq, T]: the query after which a token goes; None: sets


def cells_of(run: Run, trace: TraceFacts, rows: pd.DataFrame) -> tuple[list[LiveCell], list[str]]:
    """Those of `rows` of run.cells that can be held, and why the others cannot."""
    found, left_out = [], []
    for row in rows.itertuples():
        decision, store = decision_and_store(f"{row.policy}:{row.params}".rstrip(":"), len(trace.treated))
        selection = run.selection_of(row.cell, trace.boundary)
        if store != "exact" or selection is None:
            what = {"cache-positions": "keys move to their slots", "changed": "its store changes keys and values"}
            left_out.append(f"{row.label}: {what.get(store, 'each query reads other tokens')}")
            continue
        found.append(
            LiveCell(_facts(run, row.cell, trace.name), row.label, DECISIONS[decision], *_held(selection, decision))
        )
    return found, list(dict.fromkeys(left_out))


def _facts(run: Run, cell: str, trace: str) -> dict[str, str]:
    table = run.overall
    row = table[(table["cell"] == cell) & (table["trace"] == trace)].iloc[0]
    return {name: f"{row[name]:.17g}" if name in NUMBERS else row[name] for name in COLUMNS}


def _held(selection: Selection, decision: str) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor] | None]:
    kept = _by_layer(selection.numbers, selection.mask())
    if decision != "during-prefill" or selection.evicted_at is None:
        return kept, None
    gone = selection.evicted_at[selection.layers].astype(np.int64)
    gone[gone < 0] = NEVER
    # A layer that decides once, beside others that do not, says only what it keeps.
    prompt = gone[..., : selection.boundary]
    prompt[~selection.mask() & (prompt == NEVER)] = selection.boundary - 1
    return kept, _by_layer(selection.numbers, gone)


def _by_layer(numbers: Iterable[int], rows: np.ndarray) -> dict[int, torch.Tensor]:
    return {int(number): torch.from_numpy(np.ascontiguousarray(one)) for number, one in zip(numbers, rows, strict=True)}
